"""kill -9 in the middle of many streams, a worker that is frozen, a rolling restart: on a real Kafka."""

import asyncio
from pathlib import Path

import pytest

import kill_rounds
from kafka_broker import KafkaBroker
from plait.schemas import ErrorEvent, decode_request
from worker_harness import Site, request
from worker_process import Reading, WorkerProcess, expected, requests

pytestmark = pytest.mark.kafka

LENGTH = 60


@pytest.mark.parametrize(("delivery", "seconds"), [("idempotent", 25), ("transactional", 5)])
async def test_rounds_of_kills(kafka: KafkaBroker, tmp_path: Path, delivery: str, seconds: float) -> None:
    """As many as begin within so many seconds; benchmarks/kill_rounds.py does twenty."""
    result = await kill_rounds.run(kafka.bootstrap_servers, tmp_path, 20, seconds, delivery)
    assert result.rounds >= 1
    assert (result.missing, result.duplicated, result.unanswered, result.different) == (0, 0, 0, 0)
    assert result.second_ends == 0 and result.repeated == 0, "read back, not run again"
    assert result.midstream >= 0.9 * result.requests


@pytest.mark.parametrize("delivery", ["idempotent", "transactional"])
async def test_a_frozen_worker_that_thaws_is_not_heard(
    kafka: KafkaBroker, tmp_path: Path, delivery: str
) -> None:
    fast = {"session_timeout_ms": 1000, "heartbeat_interval_ms": 200}
    site = Site(kafka.bootstrap_servers, kafka=fast, worker={"delivery": delivery})
    topic, names = f"{site.name}.answers", [f"z{i}" for i in range(24)]
    await site.create(topic, 2)
    a = await WorkerProcess(site, tmp_path, pace=0.05).start()
    await site.produce(requests(site, names, LENGTH, topic))
    await site.read([topic], lambda found: len(found) > len(names) * LENGTH // 4)
    a.freeze()
    b = await WorkerProcess(site, tmp_path, pace=0.02).start()
    await site.answers([topic], len(names))
    a.thaw()
    await site.members(2)
    more = [f"later{i}" for i in range(8)]
    await site.produce(requests(site, more, 10, topic))
    answers = await site.answers([topic], len(names) + len(more), grace=1.0)
    await a.stop()
    await b.stop()
    for name in names:
        reading = Reading(answers[name])
        assert reading.tokens == expected(name, LENGTH) and len(reading.ends) == 1
        epochs = [event.epoch for event in reading.raw]
        assert epochs == sorted(epochs), "nothing of the old epoch behind the new one"
        if delivery == "transactional":
            assert [event.index for event in reading.raw] == list(range(len(reading.raw))), (
                "without knowing epochs"
            )
    assert any(len(set(Reading(answers[name]).epochs)) > 1 for name in names), "some were in their middle"


async def test_a_rolling_restart_under_load(kafka: KafkaBroker, tmp_path: Path) -> None:
    drain, rebalance = 3.0, 10.0  # worker.drain_seconds, and the longest that a member may be waited for
    fast = {"session_timeout_ms": 3000, "heartbeat_interval_ms": 200}
    site = Site(kafka.bootstrap_servers, partitions=6, kafka=fast, worker={"drain_seconds": drain})
    topic, length = f"{site.name}.answers", 100
    await site.create(topic, 2)
    workers = [await WorkerProcess(site, tmp_path, pace=0.05).start() for _ in range(3)]
    names: list[str] = []
    done = asyncio.Event()

    async def load() -> None:
        while not done.is_set():
            new = [f"r{len(names) + i}" for i in range(5)]
            names.extend(new)
            await site.produce(requests(site, new, length, topic))
            await asyncio.sleep(0.25)

    loading = asyncio.create_task(load())
    for i in range(3):
        successor = await WorkerProcess(site, tmp_path, pace=0.05).start()
        await workers[i].stop()
        workers[i] = successor
    done.set()
    await loading
    answers = await site.answers([topic], len(names))
    for worker in workers:
        await worker.stop()
    moved = repeated = 0
    for name in names:
        reading = Reading(answers[name])
        assert reading.tokens == expected(name, length) and [e.type for e in reading.ends] == ["done"]
        moved += len(set(reading.epochs)) > 1
        repeated += reading.repeated
    assert moved > 0, "the restarts met requests in their middle"
    assert repeated <= moved, "at most what was on its way when a partition went"
    firsts = {name: min(m.timestamp for m in answers[name]) for name in names}
    asked = await site.read([site.topics.requests], lambda found: len(found) >= len(names), grace=0)
    starts = {decode_request(m.value, None)[0].request_id: m.timestamp for m in asked}
    assert max(firsts[name] - starts[name] for name in names) < (drain + rebalance) * 1000
    assert await site.read([site.topics.dlq], lambda found: True, grace=0) == []


async def test_a_request_that_takes_workers_down(kafka: KafkaBroker, tmp_path: Path) -> None:
    fast = {"session_timeout_ms": 1000, "heartbeat_interval_ms": 200}
    site = Site(kafka.bootstrap_servers, partitions=1, kafka=fast, worker={"commit_interval_s": 0.2})
    topic, names = f"{site.name}.answers", [f"n{i}" for i in range(6)]
    await site.create(topic, 1)
    bomb = request("bomb", prompt="a bomb", response_topic=topic)
    good = requests(site, names, LENGTH, topic)
    worker = await WorkerProcess(site, tmp_path, pace=0.02).start()
    await site.produce([*good[:3], bomb, *good[3:]])
    crashes = 0
    while True:
        ended = asyncio.create_task(site.answers([topic], len(names) + 1))
        died = asyncio.create_task(worker.died(60))
        await asyncio.wait([ended, died], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            break
        crashes += 1
        assert crashes <= 3, "found after two attempts, and the first one can go uncounted"
        worker = await WorkerProcess(site, tmp_path, pace=0.02).start()
    answers = await ended
    await worker.stop()
    await died
    assert crashes >= 2
    (error,) = [message.event() for message in answers.pop("bomb")]
    assert isinstance(error, ErrorEvent) and not error.retryable and "workers died" in error.message
    (letter,) = await site.read([site.topics.dlq], lambda found: found)
    assert letter.value == bomb[0] and b"2 workers died" in (dict(letter.headers)["plait-dlq-reason"] or b"")
    for name in names:
        reading = Reading(answers[name])
        assert reading.tokens == expected(name, LENGTH) and [e.type for e in reading.ends] == ["done"]
