"""Transactions on a real Kafka: topics that come and go below them, and requests whose transaction is lost."""

import asyncio

import pytest
from aiokafka import TopicPartition

from fakes import FakeEngine
from kafka_broker import KafkaBroker
from plait.service.clock import Clock
from plait.service.membership import Membership
from plait.service.transactions import Channel
from service_bench import until
from worker_harness import Site, assert_answered_once, request

pytestmark = pytest.mark.kafka


async def test_a_topic_that_was_there_before_keeps_its_leader(kafka: KafkaBroker) -> None:
    """aiokafka knows it from the start, and would forget it when it learns of another one: what waits for it then has
    no leader, and takes its transaction with it."""
    site = Site(kafka.bootstrap_servers)
    before, later = f"{site.name}.before", f"{site.name}.later"
    await site.create(before, 1)
    membership = Membership(Clock(), 1e9)
    membership.heard("coordinator", Clock().monotonic())
    failures: list[str] = []
    channel = Channel(
        site.settings,
        membership,
        site.name,
        TopicPartition(site.topics.requests, 0),
        lambda: failures.append("lost"),
    )
    await channel.open()
    try:
        await site.create(later, 1)
        async with asyncio.timeout(60):
            sent = [await channel.send(topic, b"v", b"k", []) for topic in (before, later)]
            cluster = channel._producer.client.cluster
            assert {cluster.leader_for_partition(TopicPartition(topic, 0)) for topic in (before, later)} == {
                1
            }
            for _, delivery in sent:
                await delivery
    finally:
        await channel.close()
    assert not failures


class Tokenless(FakeEngine):
    """Has always begun with what it was given."""

    def begun(self, request_id: str) -> bool:
        return True


async def test_a_request_whose_transaction_is_lost_again_and_again_is_no_poison(kafka: KafkaBroker) -> None:
    """Nobody has died of it: a lost transaction is no attempt, although a commit says that one is open."""
    site = Site(kafka.bootstrap_servers, partitions=1, worker={"delivery": "transactional"})
    topic, engine = f"{site.name}.answers", Tokenless()
    engine.hold()

    async with site.worker(engine) as worker:
        await site.produce([request("slow", response_topic=topic)])
        for times in range(1, 4):
            await until(lambda n=times: len(engine.submitted) == n, seconds=60)
            await site.marked(0, 1)
            (partition,) = worker.intake._partitions.values()
            partition.channel.fail("made to fail")
        await until(lambda: len(engine.submitted) == 4, seconds=60)
        engine.release()
        answers = await site.answers([topic], 1)
    assert assert_answered_once(answers["slow"]).type == "done"
