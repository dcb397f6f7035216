"""Rounds of kill -9: a worker dies in the middle of many streams, another one takes over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker_harness import Site
from worker_process import Reading, WorkerProcess, expected, requests

LENGTH = 60
PACE = 0.05
STREAMS = 50
SESSION_MS = 1000


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
) -> Outcome:
    """Up to `rounds` rounds, as many as begin within `seconds`: in each, the worker that has the partitions is
    killed while its streams are in their middle, and one that was started beside it goes on."""
    kafka = {"session_timeout_ms": SESSION_MS, "heartbeat_interval_ms": SESSION_MS // 5}
    site = Site(bootstrap_servers, kafka=kafka, worker={"commit_interval_s": 0.2, "delivery": delivery})
    result, until = Outcome(), time.monotonic() + seconds
    worker = await WorkerProcess(site, folder, PACE).start()
    try:
        while result.rounds < rounds and time.monotonic() < until:
            worker = await _round(site, folder, worker, result)
            say(
                f"round {result.rounds}: {result.midstream} of {result.requests} streams were in their middle; tokens"
                f" missing {result.missing}, duplicated {result.duplicated}; unanswered {result.unanswered},"
                f" other text {result.different}; repeated in the topics {result.repeated};"
                f" taken over after {result.takeover_s[-1]:.1f} s"
            )
    finally:
        await worker.kill()
    return result


async def _round(site: Site, folder: Path, worker: WorkerProcess, result: Outcome) -> WorkerProcess:
    number = result.rounds
    shared = f"{site.name}.answers{number}"
    await site.create(shared, 2)
    names = [f"k{number}-{i}" for i in range(STREAMS)]
    # One in five has a topic of its own.
    own = [name for i, name in enumerate(names) if i % 5 == 0]
    others = [name for name in names if name not in own]
    await site.produce(requests(site, own, LENGTH, None) + requests(site, others, LENGTH, shared))

    def in_the_middle(found: list[Any]) -> bool:
        return len({m.key for m in found}) >= len(others) and len(found) > len(others) * LENGTH // 4

    await site.read([shared], in_the_middle, grace=0)
    await worker.kill()
    killed = time.time() * 1000
    successor = await WorkerProcess(site, folder, PACE).start()
    try:
        answers = await site.answers([shared, *map(site.response_topic, own)], STREAMS, seconds=60)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{successor.log.read_text()[-3000:]}") from error
    result.rounds += 1
    result.requests += STREAMS
    first = float("inf")
    for name in names:
        messages = answers.get(name, [])
        reading = Reading(messages)
        want, got = expected(name, LENGTH), reading.tokens
        before = [m for m in messages if m.timestamp <= killed]
        result.midstream += 0 < len(before) < LENGTH
        result.missing += max(0, len(want) - len(got))
        result.duplicated += max(0, len(got) - len(want))
        result.unanswered += len(reading.ends) != 1 or reading.ends[0].type != "done"
        result.different += got != want or reading.text != "".join(f" {token}" for token in want)
        result.repeated += reading.repeated
        result.second_ends += sum(e.type != "tokens" for e in reading.raw) - 1
        result.tokens += len(want)
        first = min([first, *(m.timestamp for m in messages if m.timestamp > killed)])
    result.takeover_s.append((first - killed) / 1000)
    return successor
