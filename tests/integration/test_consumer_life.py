"""Restarts that the group does not notice, and topics that are deleted, made anew or cut off below a reader."""

import pytest

from fakes import FakeEngine
from kafka_broker import KafkaBroker
from service_bench import until
from worker_harness import Site, assert_answered_once, request

pytestmark = pytest.mark.kafka


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


def known(worker: object) -> set[str]:
    """The topics of the partitions that the worker has."""
    return {tp.topic for tp in worker.intake._partitions}  # type: ignore[attr-defined]
