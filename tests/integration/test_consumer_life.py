"""Restarts that the group does not notice, and topics that are deleted, made anew or cut off below a reader."""

import asyncio
import time
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from confluent_kafka import TopicPartition as ForeignPartition
from confluent_kafka.admin import AdminClient

from fakes import FakeEngine
from kafka_broker import KafkaBroker
from plait.service.worker import Worker, WorkerFailed
from service_bench import until
from worker_harness import Site, assert_answered_once, request
from worker_process import Reading, WorkerProcess, expected, requests

pytestmark = pytest.mark.kafka

LENGTH = 60


async def test_a_restart_of_a_static_member_disturbs_nobody(kafka: KafkaBroker) -> None:
    """Static membership (KIP-345): a worker that comes back within its session timeout gets its partitions back."""
    names = ("a", "b", "c")
    sites = {name: Site(kafka.bootstrap_servers) for name in names}
    first = sites["a"]
    for name, site in sites.items():
        kafka_section = {"group_id": first.name, "group_instance_id": name}
        site.configure(kafka=kafka_section, topics=first.topics.model_dump(exclude_unset=True))
        site.name = first.name
    topic = f"{first.name}.answers"
    async with sites["a"].worker() as a, sites["b"].worker() as b:
        async with sites["c"].worker():
            await until(lambda: {len(w.intake._partitions) for w in (a, b)} <= {1, 2})
            await until(lambda: a.intake.assigned.is_set() and b.intake.assigned.is_set())
            rebalances = [w.metrics.rebalances._value.get() for w in (a, b)]
            await first.produce([request(f"x{i}", response_topic=topic) for i in range(20)])
            await first.answers([topic], 20)
        async with sites["c"].worker() as again:
            assert len(again.intake._partitions) > 0
            await first.produce([request(f"y{i}", response_topic=topic) for i in range(20)])
            answers = await first.answers([topic], 40)
            assert [w.metrics.rebalances._value.get() for w in (a, b)] == rebalances
    assert all(assert_answered_once(events).type == "done" for events in answers.values())
    assert sum((await first.committed()).values()) == 40


@pytest.mark.parametrize("delivery", ["idempotent", "transactional"])
async def test_a_static_member_that_is_killed_in_the_middle_of_its_streams(
    kafka: KafkaBroker, tmp_path: Path, delivery: str
) -> None:
    """Started again under its name, it has its partitions again, in the same generation, and goes on with its streams;
    the other worker's never stop."""
    slow = {"session_timeout_ms": 30_000, "heartbeat_interval_ms": 500}
    site = Site(kafka.bootstrap_servers, kafka=slow, worker={"delivery": delivery})
    topic, names, later = f"{site.name}.answers", [f"s{i}" for i in range(24)], [f"l{i}" for i in range(12)]
    await site.create(topic, 2)

    async def start(name: str) -> WorkerProcess:
        return await WorkerProcess(site, tmp_path, 0.1, PLAIT_KAFKA_GROUP_INSTANCE_ID=name).start()

    a, b = await start("a"), await start("b")
    await site.members(2)
    before = await site.assignment()
    await site.produce(requests(site, names, LENGTH, topic))
    await site.read([topic], lambda found: len(found) > len(names) * LENGTH // 4, grace=0)
    await a.kill()
    killed = time.time() * 1000
    a = await start("a")
    await site.produce(requests(site, later, 5, topic))
    answers = await site.answers([topic], len(names) + len(later))
    assert await site.assignment() == before and sorted(map(len, before.values())) == [2, 2]
    await a.stop()
    await b.stop()
    moved = set()
    for name in names + later:
        reading = Reading(answers[name])
        assert reading.tokens == expected(name, LENGTH if name in names else 5)
        assert [end.type for end in reading.ends] == ["done"] and reading.repeated == 0
        assert [event.index for event in reading.raw] == list(range(len(reading.raw))), (
            "read back, not run again"
        )
        if len(set(reading.epochs)) > 1:
            moved.add(name)
            assert answers[name][0].timestamp <= killed
    epochs = {event.epoch for name in later for event in Reading(answers[name]).raw}
    assert len(epochs) == 1 and epochs == {min(Reading(answers[name]).epochs[0] for name in names)}, (
        "no rebalance"
    )
    assert 0 < len(moved) < len(names), "those of the worker that died, and no others"


async def test_a_requests_topic_that_is_deleted_and_made_again(
    kafka: KafkaBroker, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(kafka.bootstrap_servers, partitions=2, kafka={"metadata_max_age_ms": 500})
    topic = f"{site.name}.answers"
    async with site.worker(FakeEngine()) as worker:
        await site.produce([request(f"x{i}", response_topic=topic) for i in range(30)])
        await site.answers([topic], 30)
        await site.delete(site.topics.requests)
        await until(lambda: site.topics.requests not in known(worker), seconds=30)
        await site.create(site.topics.requests, 3)
        await site.produce([request(f"y{i}", response_topic=topic) for i in range(10)])
        answers = await site.answers([topic], 40)
        assert worker._failure is None
    assert all(assert_answered_once(events).type == "done" for events in answers.values())


@pytest.mark.parametrize(("policy", "answered"), [("earliest", 7), ("latest", 2), ("fail", 0)])
async def test_requests_that_were_removed_before_they_were_read(
    kafka: KafkaBroker, caplog: pytest.LogCaptureFixture, policy: str, answered: int
) -> None:
    site = Site(kafka.bootstrap_servers, partitions=1, kafka={"on_out_of_range": policy})
    topic = f"{site.name}.answers"
    async with site.worker():
        await site.produce([request("first", response_topic=topic)])
        await site.answers([topic], 1)
    await site.produce([request(f"x{i}", response_topic=topic) for i in range(20)])
    await asyncio.to_thread(remove_before, site, 16)
    if policy == "fail":
        with pytest.raises(WorkerFailed, match=r"offset 1 is out of range, the log holds 16 to 21"):
            await Worker(site.settings, FakeEngine()).run()
        return
    async with site.worker() as worker:
        await until(lambda: "15 requests were never read" in caplog.text)
        requests = TopicPartition(site.topics.requests, 0)
        async with asyncio.timeout(30):
            while await worker.intake._consumer.position(requests) < 21:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await site.produce([request("last", response_topic=topic)])
        answers = await site.answers([topic], answered)
        assert worker.metrics.out_of_range.labels(policy=policy)._value.get() == 1
    kept = {f"x{i}" for i in range(15, 20)} if policy == "earliest" else set()
    assert set(answers) == {"first", "last"} | kept


def remove_before(site: Site, offset: int) -> None:
    admin = AdminClient({"bootstrap.servers": site.bootstrap_servers})
    for done in admin.delete_records([ForeignPartition(site.topics.requests, 0, offset)]).values():
        done.result(30)


async def test_requests_of_a_deleted_topic_are_answered(kafka: KafkaBroker) -> None:
    site = Site(kafka.bootstrap_servers, partitions=1, kafka={"metadata_max_age_ms": 500})
    topic = f"{site.name}.answers"
    engine = FakeEngine()
    async with site.worker(engine) as worker:
        engine.hold()
        await site.produce([request(f"x{i}", response_topic=topic) for i in range(5)])
        await until(lambda: len(engine.submitted) == 5)
        await site.delete(site.topics.requests)
        await until(lambda: not worker.intake._partitions, seconds=30)
        engine.release()
        answers = await site.answers([topic], 5)
    assert all(assert_answered_once(events).type == "done" for events in answers.values())


def known(worker: object) -> set[str]:
    """The topics of the partitions that the worker has."""
    return {tp.topic for tp in worker.intake._partitions}  # type: ignore[attr-defined]
