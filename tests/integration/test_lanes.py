"""Lanes on Apache Kafka: a backlog in one does not stand before another."""

import asyncio

import pytest

from fakes import FakeEngine
from kafka_broker import KafkaBroker
from plait.service.worker import Worker
from service_bench import until
from worker_harness import Site, assert_answered_once, request

pytestmark = pytest.mark.kafka


def site_with_lanes(kafka: KafkaBroker, **lane: object) -> tuple[Site, str, str]:
    """A site with an urgent lane beside the default one, which is the batch lane."""
    site = Site(kafka.bootstrap_servers)
    urgent, batch = f"{site.name}.urgent", site.topics.requests
    lanes = [
        {"name": "urgent", "topic": urgent, "reserved": 0.25, "priority": 9},
        {"name": "batch", "topic": batch, "priority": 1, **lane},
    ]
    site.configure(topics={"lanes": lanes}, worker={"max_in_flight": 32})
    return site, urgent, batch


async def test_an_urgent_request_passes_a_backlog(kafka: KafkaBroker) -> None:
    site, urgent, batch = site_with_lanes(kafka)
    engine = FakeEngine(pace=0.001, max_running=8)
    answers_topic = f"{site.name}.answers"
    count = 2500
    async with site.worker(engine) as worker:
        engine.hold()
        await site.produce(
            [
                request(f"b{i}", response_topic=answers_topic, sampling={"max_tokens": 1})
                for i in range(count)
            ],
            batch,
        )
        lanes = {intake.lane.name: intake for intake in worker.intakes}
        await until(lambda: lanes["batch"].in_flight == 24)
        await until(lambda: len(engine.submitted) == 24)
        await site.produce([request(f"u{i}", response_topic=answers_topic) for i in range(9)], urgent)
        await until(lambda: lanes["urgent"].in_flight == 8)
        await until(lambda: len(engine.submitted) == 32)
        assert [r.priority for r in engine.submitted] == [1] * 24 + [9] * 8
        assert len(lanes["urgent"]._held) == len(lanes["batch"]._held) == 4, "both are full now"
        engine.release()
        await until(lambda: len([r for r in engine.submitted if r.priority == 9]) == 9)
        assert len(engine.submitted) < count / 2, "the backlog is still there"
        answers = await site.answers([answers_topic], count + 9)
    assert len(answers) == count + 9
    assert all(assert_answered_once(events).type == "done" for events in answers.values())
    assert sum((await site.committed()).values()) == count


async def test_a_lane_of_another_worker_keeps_what_it_has(kafka: KafkaBroker) -> None:
    """Pauses are computed anew at each assignment, of each lane by itself; groups rebalance one by one."""
    site, urgent, batch = site_with_lanes(kafka)
    first, second = FakeEngine(), FakeEngine()
    first.hold()
    second.hold()
    async with site.worker(first) as a:
        await site.produce([request(f"b{i}") for i in range(200)], batch)
        await until(lambda: len(first.submitted) == 24)
        async with site.worker(second) as b:
            await until(lambda: all(len(i._partitions) == 2 for i in (*a.intakes, *b.intakes)))
            await until(lambda: len(second.submitted) == 24)

            def held(worker: Worker) -> dict[str, int]:
                return {i.lane.name: len(i._consumer.paused()) for i in worker.intakes}

            await until(lambda: held(a) == held(b) == {"urgent": 0, "batch": 2})
            first.release()
            second.release()
            await site.answers([site.response_topic(f"b{i}") for i in range(200)], 200)
        await until(lambda: all(len(i._partitions) == 4 for i in a.intakes))
        await site.produce([request("last")], urgent)
        await site.answers([site.response_topic("last")], 1)
        assert [len(i._consumer.paused()) for i in a.intakes] == [0, 0]


async def test_lanes_divide_what_becomes_free_by_weight(kafka: KafkaBroker) -> None:
    site, urgent, batch = site_with_lanes(kafka, weight=2)
    engine = FakeEngine(pace=0.002, max_running=4)
    topic = f"{site.name}.answers"
    async with site.worker(engine) as worker:
        engine.hold()
        for lane in (batch, urgent):
            await site.produce([request(f"{lane[-5:]}{i}", response_topic=topic) for i in range(400)], lane)
        await until(lambda: len(engine.submitted) == 32)
        engine.release()
        await until(lambda: len(engine.submitted) > 200)
        lanes = {intake.lane.name: intake.in_flight for intake in worker.intakes}
        # 8 are the urgent lane's own, of the other 24 it has a third.
        assert lanes == {"urgent": pytest.approx(16, abs=2), "batch": pytest.approx(16, abs=2)}
        engine.pace = 0.0
        await site.answers([topic], 800)


async def test_topics_shows_every_lane(kafka: KafkaBroker) -> None:
    from plait.service.topic_admin import report

    site, urgent, _ = site_with_lanes(kafka)
    engine = FakeEngine()
    async with site.worker(engine):
        engine.hold()
        await site.produce([request(f"u{i}") for i in range(3)], urgent)
        await until(lambda: len(engine.submitted) == 3)
        servers = {"bootstrap_servers": site.bootstrap_servers}
        rows = {row.name: row for row in await report(servers, site.topics, site.name)}
        assert rows[urgent].kind == "requests" and rows[urgent].lag == 3
        assert rows[site.topics.requests].lag == 0
        await asyncio.sleep(0)
        engine.release()
