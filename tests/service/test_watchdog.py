"""A worker that stands still is not alive, and says where it stands."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from plait.service.watchdog import Watchdog
from service_bench import until

STUCK = """
import asyncio, sys, time, urllib.request, threading
from fakes import FakeEngine
from plait.service.settings import Settings
from plait.service.worker import Worker

def spin_for_ever():
    probe()
    while not answered:
        pass  # what a regular expression gone wild does to a loop

answered = []

def probe():
    def ask():
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{worker.http.port}/livez", timeout=3)
            answered.append("alive")
        except OSError as error:
            answered.append(f"{type(error).__name__}")
    threading.Thread(target=ask).start()

async def main():
    global worker
    worker = Worker(
        Settings.load(kafka={"bootstrap_servers": "127.0.0.1:1"}, http={"port": 0, "stalled_after_s": 0.5}),
        FakeEngine(),
    )
    task = asyncio.create_task(worker.run())
    while not worker.http._runner:
        await asyncio.sleep(0.01)
    while worker.watchdog._task is None:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    spin_for_ever()
    print(answered, flush=True)
    worker.stop()
    await asyncio.wait([task])

asyncio.run(main())
"""


def test_a_stuck_loop_fails_the_probe_and_its_stack_is_written() -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{STUCK}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['TimeoutError']", done.stdout
    assert "Timeout (0:00:00.500000)!" in done.stderr
    assert "in spin_for_ever" in done.stderr


async def test_a_part_that_stands_still_has_all_tasks_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    problems: list[str] = []
    checks = 0

    def check() -> str | None:
        nonlocal checks
        checks += 1
        return problems[0] if problems else None

    async def waits_for_something_that_never_comes() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(waits_for_something_that_never_comes(), name="the-stuck-one")
    watchdog = Watchdog(0.02, check)
    with caplog.at_level(logging.ERROR, "plait"):
        watchdog.start()
        await until(lambda: checks > 1)
        assert caplog.messages == []
        problems.append("requests have not been polled for 30 s")
        await until(lambda: caplog.messages)
        await until(lambda: checks > 5)
        (message,) = caplog.messages
    assert "requests have not been polled" in message
    assert "the-stuck-one" in message and "waits_for_something_that_never_comes" in message
    await watchdog.stop()
    task.cancel()
