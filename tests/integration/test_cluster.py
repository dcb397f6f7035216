"""Three brokers, each a controller too: a leader is killed under load, and nothing is lost."""

import asyncio

import pytest
from confluent_kafka.admin import AdminClient
from test_worker_recovers import assert_complete, requests

from fakes import FakeEngine
from kafka_broker import KafkaBroker, KafkaCluster
from plait.schemas import TokensEvent
from plait.service.client import Client
from service_bench import until
from worker_harness import Site, assert_answered_once

pytestmark = pytest.mark.kafka

STREAMS = 30
TOKENS = 150


def leader_of(cluster: KafkaCluster, topic: str) -> KafkaBroker:
    found = AdminClient({"bootstrap.servers": cluster.bootstrap_servers}).list_topics(topic, 30)
    leader = found.topics[topic].partitions[0].leader
    return next(node for node in cluster.nodes if node.node == leader)


async def read(client: Client, request_id: str, seen: dict[str, list[int]]) -> str:
    async for event in client.stream(request_id, timeout_s=120):
        if isinstance(event, TokensEvent):
            seen[request_id] += event.token_ids
    return str(event.type)


@pytest.mark.parametrize(
    ("delivery", "led"),
    [("idempotent", "answers"), ("transactional", "answers"), ("transactional", "__transaction_state")],
)
async def test_the_leader_is_killed_under_load(kafka_cluster: KafkaCluster, delivery: str, led: str) -> None:
    """That of the answers' topic, or the coordinator of all transactions. With those a reader of committed events sees
    each index once and in order, without knowing epochs."""
    site = Site(
        kafka_cluster.bootstrap_servers,
        partitions=3,
        kafka={"request_timeout_ms": 5000},
        worker={"delivery": delivery},
    )
    engine = FakeEngine(pace=0.05, max_running=200)
    async with (
        site.worker(engine),
        Client(
            site.bootstrap_servers, requests_topic=site.topics.requests, control_topic=site.topics.control
        ) as client,
    ):
        submit = [client.submit(f"stream {i}", max_tokens=TOKENS, seed=1) for i in range(STREAMS)]
        ids = await asyncio.gather(*submit)
        seen: dict[str, list[int]] = {request_id: [] for request_id in ids}
        readers = [asyncio.create_task(read(client, request_id, seen)) for request_id in ids]
        await site.produce(requests(site, 20))
        await until(lambda: len(engine.submitted) == STREAMS + 20 and all(seen.values()), seconds=60)
        assert client.response_topic is not None
        victim = leader_of(kafka_cluster, client.response_topic if led == "answers" else led)
        before = {request_id: len(tokens) for request_id, tokens in seen.items()}
        await asyncio.to_thread(victim.kill)
        assert max(before.values()) < TOKENS, "no stream was under way"
        try:
            await site.produce(requests(site, 10, start=20))
            # They go on while the broker is away: it comes back only at the end. How soon is up to the failover; the
            # engine may have ended by then, and all come at once.
            await until(lambda: all(len(seen[r]) > before[r] for r in ids), seconds=60)
            assert set(await asyncio.gather(*readers)) == {"done"}
            answers = await site.answers([f"{site.name}.answers"], 30)
        finally:
            victim.launch()
            await asyncio.to_thread(victim.wait)
            await asyncio.to_thread(kafka_cluster.heal)
        assert_complete(answers, 30)
        if delivery == "transactional":
            streams = await site.answers([client.response_topic], STREAMS)
            assert {assert_answered_once(found).type for found in (answers | streams).values()} == {"done"}
        assert [len(tokens) for tokens in seen.values()] == [TOKENS] * STREAMS
        async with asyncio.timeout(60):
            while sum((await site.committed()).values()) != STREAMS + 30:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
