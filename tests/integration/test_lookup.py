"""Reading back what was published: bounded, shared by all who ask together, and past the marks of transactions."""

import asyncio
import time
import uuid
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from fakes import FakeEngine
from plait.schemas import MSGPACK, TokensEvent, encode
from plait.service.commit_metadata import decode
from plait.service.lookup import SKEW_MS, Lookup
from service_bench import until
from worker_harness import Site, request


@pytest.fixture(params=[pytest.param("kafka", marks=pytest.mark.kafka), "embedded_broker"])
def site(request: pytest.FixtureRequest) -> Site:
    return Site(request.getfixturevalue(request.param).bootstrap_servers)


def event(request_id: str, index: int) -> bytes:
    return encode(TokensEvent(request_id=request_id, index=index, epoch=1, token_ids=[index], text="x"))


async def publish(site: Site, topic: str, events: list[tuple[str, int]], **options: Any) -> None:
    at = options.pop("timestamp_ms", None)
    producer = AIOKafkaProducer(bootstrap_servers=site.bootstrap_servers, **options)
    await producer.start()
    if "transactional_id" in options:
        await producer.begin_transaction()
    for name, index in events:
        headers = [("content-type", MSGPACK.encode())]
        await producer.send(topic, event(name, index), key=name.encode(), headers=headers, timestamp_ms=at)
    await producer.flush()
    if "transactional_id" in options:
        await producer.commit_transaction()
    await producer.stop()


async def test_many_share_one_scan(site: Site) -> None:
    topic = f"{site.name}.answers"
    await site.create(topic, 4)
    names = [f"r{i}" for i in range(30)]
    await publish(site, topic, [(name, index) for index in range(5) for name in names])
    made: list[AIOKafkaConsumer] = []

    def make(**kw: Any) -> AIOKafkaConsumer:
        made.append(AIOKafkaConsumer(**kw))
        return made[-1]

    lookup = Lookup(site.settings, make)
    now = int(time.time() * 1000)
    found = await asyncio.gather(*(lookup.find(topic, name, now) for name in [*names, "unknown"]))
    assert [len(history.events) for history in found] == [5] * 30 + [0]
    assert lookup.scans == len(made) == 1
    own = site.response_topic("mine")
    await site.create(own, 1)
    await publish(site, own, [("mine", 0)])
    mine, missing = await asyncio.gather(
        lookup.find(own, "mine", None), lookup.find(site.response_topic("none"), "none", None)
    )
    assert len(mine.events) == 1 and missing.events == []


async def test_not_older_than_the_request(site: Site) -> None:
    topic, now = f"{site.name}.answers", int(time.time() * 1000)
    await site.create(topic, 1)
    await publish(site, topic, [("r", 0)], timestamp_ms=now - SKEW_MS - 60_000)
    await publish(site, topic, [("other", 0)], timestamp_ms=now)
    lookup = Lookup(site.settings)
    assert (await lookup.find(topic, "r", now)).events == []
    assert len((await lookup.find(topic, "r", now - 60_000)).events) == 1
    assert (await lookup.find(topic, "r", now + 10 * SKEW_MS)).events == [], "nothing is so new"


@pytest.mark.kafka
async def test_the_marks_of_transactions_hold_nothing_up(kafka: Any) -> None:
    site = Site(kafka.bootstrap_servers, worker={"delivery": "transactional"})
    topic = f"{site.name}.answers"
    await site.create(topic, 1)
    await publish(site, topic, [("r", 0), ("r", 1)], transactional_id=uuid.uuid4().hex)
    open_one = AIOKafkaProducer(bootstrap_servers=site.bootstrap_servers, transactional_id=uuid.uuid4().hex)
    await open_one.start()
    await open_one.begin_transaction()
    await open_one.send_and_wait(topic, event("other", 0), key=b"other", headers=[])
    await publish(site, topic, [("r", 2)], transactional_id=uuid.uuid4().hex)
    finding = asyncio.create_task(Lookup(site.settings).find(topic, "r", int(time.time() * 1000)))
    await asyncio.sleep(0.5)
    assert not finding.done(), "behind the open transaction there is an event of the request"
    await open_one.abort_transaction()
    await open_one.stop()
    assert [e.index for e in (await finding).events] == [0, 1, 2]


async def test_a_worker_that_left_in_the_middle_leaves_all_that_is_needed(site: Site) -> None:
    """On both brokers: finished above the prefix, and tokens that are gone on with."""
    topic = f"{site.name}.answers"
    await site.create(topic, 2)
    site.settings.worker.drain_seconds = 0
    slow = FakeEngine(pace=0.05)
    names = [f"r{i}" for i in range(12)]
    async with site.worker(slow):
        await site.produce(
            request(name, response_topic=topic, sampling={"max_tokens": 3 if i % 2 else 60, "seed": 1})
            for i, name in enumerate(names)
        )
        await site.answers([topic], 6)
        await until(lambda: len(slow._sequences) == 6)
    metadata = await site.committed_metadata()
    states = [decode(offset, text) for offset, text in metadata.values()]
    assert all(state is not None and not state.marks for state in states), (metadata, states)
    assert any(state.finished for state in states if state)
    quick = FakeEngine(pace=0.002)
    async with site.worker(quick):
        answers = await site.answers([topic], 12)
    assert len(quick.submitted) == 6 and all(s.output_token_ids for s in quick.submitted)
    for messages in answers.values():
        assert [m.event().index for m in messages] == list(range(len(messages)))
        assert [m.event().type for m in messages].count("done") == 1
    assert sum((await site.committed()).values()) == 12
