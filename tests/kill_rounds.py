"""Rounds of kill -9: a worker dies in the middle of many streams, another one takes over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kill_loads import FakeLoad, Load
from worker_harness import Message, Site
from worker_process import Reading, WorkerProcess


@dataclass
class Outcome:
    """Counts over the rounds; `takeover_s` from the kill to the first event of the next owner."""

    rounds: int = 0
    requests: int = 0
    midstream: int = 0
    missing: int = 0
    duplicated: int = 0
    unanswered: int = 0
    different: int = 0
    repeated: int = 0
    second_ends: int = 0
    tokens: int = 0
    takeover_s: list[float] = field(default_factory=list)


async def run(
    bootstrap_servers: str,
    folder: Path,
    rounds: int,
    seconds: float = 1e9,
    delivery: str = "idempotent",
    say: Callable[[str], None] = lambda _: None,
    load: Load | None = None,
) -> Outcome:
    """Up to `rounds` rounds, as many as begin within `seconds`: in each, the worker that has the partitions is
    killed while its streams are in their middle, and one that was started beside it goes on."""
    load = load or FakeLoad()
    kafka = {"session_timeout_ms": load.session_ms, "heartbeat_interval_ms": load.session_ms // 5}
    site = Site(bootstrap_servers, kafka=kafka, worker={"commit_interval_s": 0.2, "delivery": delivery})
    site.configure(engine=load.engine)
    result, worker = Outcome(), WorkerProcess(site, folder, load.pace)
    try:
        await asyncio.gather(worker.start(), load.prepare())
        until = time.monotonic() + seconds
        while result.rounds < rounds and time.monotonic() < until:
            worker = await _round(site, folder, worker, result, load)
            say(
                f"round {result.rounds}: {result.midstream} of {result.requests} streams were in their middle; tokens"
                f" missing {result.missing}, duplicated {result.duplicated}; unanswered {result.unanswered},"
                f" other text {result.different}; repeated in the topics {result.repeated};"
                f" taken over after {result.takeover_s[-1]:.1f} s"
            )
    finally:
        await worker.kill()
    return result


async def _round(
    site: Site, folder: Path, worker: WorkerProcess, result: Outcome, load: Load
) -> WorkerProcess:
    number = result.rounds
    shared = f"{site.name}.answers{number}"
    await site.create(shared, 2)
    names = [f"k{number}-{i}" for i in range(load.streams)]
    # One in five has a topic of its own.
    own = [name for i, name in enumerate(names) if i % 5 == 0]
    others = [name for name in names if name not in own]
    await site.produce(load.requests(site, own, None) + load.requests(site, others, shared))

    def in_the_middle(found: list[Message]) -> bool:
        begun = len({m.key for m in found}) >= len(others)
        return begun and (len(found) > len(others) * load.length // 4 or any(map(_ends, found)))

    await site.read([shared], in_the_middle, grace=0)
    await worker.kill()
    killed = time.time() * 1000
    successor = await WorkerProcess(site, folder, load.pace).start()
    try:
        answers = await site.answers([shared, *map(site.response_topic, own)], load.streams, seconds=60)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{successor.log.read_text()[-3000:]}") from error
    result.rounds += 1
    result.requests += load.streams
    first = float("inf")
    for name in names:
        messages = answers.get(name, [])
        reading = Reading(messages)
        (want, text), got = load.expected(name), reading.tokens
        before = [m for m in messages if m.timestamp <= killed]
        result.midstream += bool(before) and not any(map(_ends, before))
        result.missing += max(0, len(want) - len(got))
        result.duplicated += max(0, len(got) - len(want))
        result.unanswered += len(reading.ends) != 1 or reading.ends[0].type != "done"
        result.different += got != want or reading.text != text
        result.repeated += reading.repeated
        result.second_ends += sum(e.type != "tokens" for e in reading.raw) - 1
        result.tokens += len(want)
        first = min([first, *(m.timestamp for m in messages if m.timestamp > killed)])
    result.takeover_s.append((first - killed) / 1000)
    return successor


def _ends(message: Message) -> bool:
    return dict(message.headers)["plait-type"] in (b"done", b"error")
