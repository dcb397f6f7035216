"""Workers with a fake engine on a running broker, and foreign clients (confluent-kafka) around them."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgpack
from aiokafka import AIOKafkaProducer
from aiokafka import TopicPartition as AioTopicPartition
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConsumerGroupDescription, NewTopic
from opentelemetry.sdk.trace import TracerProvider

from fakes import FakeEngine
from plait.schemas import Event, decode_event
from plait.service.commit_metadata import decode
from plait.service.settings import Settings
from plait.service.worker import Worker


@dataclass
class Message:
    """One message as a foreign consumer saw it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    timestamp: int = 0  # ms since the epoch

    def event(self) -> Event:
        content_type = dict(self.headers)["content-type"]
        assert self.value is not None and content_type is not None
        return decode_event(self.value, content_type.decode())


class Site:
    """A set of topics and a group of their own on a broker that others use too."""

    def __init__(self, bootstrap_servers: str, partitions: int = 4, **sections: dict[str, Any]) -> None:
        self.name = uuid.uuid4().hex[:8]
        self.bootstrap_servers = bootstrap_servers
        kafka = {
            "bootstrap_servers": bootstrap_servers,
            "group_id": self.name,
            "session_timeout_ms": 6000,
            "heartbeat_interval_ms": 500,
            "fetch_max_wait_ms": 100,
        }
        topics = {
            "requests": f"{self.name}.requests",
            "responses_prefix": f"{self.name}.responses.",
            "control": f"{self.name}.control",
            "dlq": f"{self.name}.dlq",
            "request_partitions": partitions,
            "named_responses": f"(plait[.]clients|{self.name})[.].+",
        }
        self.settings = Settings.load(
            kafka=kafka | sections.get("kafka", {}),
            topics=topics | sections.get("topics", {}),
            worker={"commit_interval_s": 0.1, "drain_seconds": 20} | sections.get("worker", {}),
            http={"port": 0} | sections.get("http", {}),
            telemetry=sections.get("telemetry", {}),
        )
        self.topics = self.settings.topics

    def configure(self, **sections: dict[str, Any]) -> None:
        """Change settings that depend on the site's name."""
        given = self.settings.model_dump(exclude_unset=True)
        for name, section in sections.items():
            given[name] = given.get(name, {}) | section
        self.settings = Settings.load(**given)
        self.topics = self.settings.topics

    def response_topic(self, request_id: str) -> str:
        return self.topics.responses_prefix + request_id

    @asynccontextmanager
    async def worker(
        self, engine: FakeEngine | None = None, provider: TracerProvider | None = None
    ) -> AsyncIterator[Worker]:
        """A worker that is ready; it has to run without a failure, and to stop in order at the end."""
        trouble: list[str] = []
        watch = logging.Handler(logging.WARNING)
        watch.emit = lambda record: trouble.append(record.getMessage())  # type: ignore[method-assign]
        log = logging.getLogger("plait.service.worker")
        log.addHandler(watch)
        worker = Worker(self.settings, engine or FakeEngine(pace=0.002), provider=provider)
        task = asyncio.create_task(worker.run())
        ready = asyncio.create_task(worker.ready.wait())
        try:
            await asyncio.wait([task, ready], timeout=60, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            assert worker.ready.is_set(), "the worker did not become ready"
            yield worker
        finally:
            ready.cancel()
            if not worker.stopping:
                worker.stop()
            await asyncio.wait([task], timeout=60)
            log.removeHandler(watch)
            assert task.done(), "the worker did not stop"
        task.result()
        assert trouble == []

    async def produce(
        self, messages: Iterable[tuple[bytes | None, list[tuple[str, Any]]]], topic: str | None = None
    ) -> None:
        def send() -> None:
            producer = Producer({"bootstrap.servers": self.bootstrap_servers, "message.max.bytes": 2_000_000})
            for number, (value, headers) in enumerate(messages):
                key = str(number)  # spreads them over the partitions
                producer.produce(topic or self.topics.requests, value=value, key=key, headers=headers)
                producer.poll(0)
            assert producer.flush(30) == 0

        await asyncio.to_thread(send)

    async def produce_raw(
        self, value: bytes, headers: list[tuple[str, bytes]], bad: list[tuple[str, bytes]], bad_name: bytes
    ) -> None:
        """Three records in one batch: a tombstone, `value`, and one with a header whose name is no text."""
        tp = AioTopicPartition(self.topics.requests, 0)
        builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 100_000)
        builder.append(0, None, b"k", None, [])
        builder.append(1, None, b"k", value, headers)
        builder.append(2, None, b"k", value, bad)
        batch = bytearray(builder.build())
        at = batch.index(bad[0][0].encode())
        batch[at : at + len(bad_name)] = bad_name
        struct.pack_into(">I", batch, 17, calc_crc32c(bytes(batch[21:])))
        producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap_servers)
        await producer.start()
        try:
            await producer.partitions_for(tp.topic)
            node = producer.client.cluster.leader_for_partition(tp)
            response = await producer.client.send(
                node, ProduceRequest(None, 1, 10_000, [(tp.topic, [(tp.partition, bytes(batch))])])
            )
            ((_, ((_, error, *_),)),) = response.topics
            assert error == 0
        finally:
            await producer.stop()

    async def cancel(self, request_id: str) -> None:
        value = json.dumps({"v": 1, "type": "cancel", "request_id": request_id}).encode()
        await self.produce([(value, [])], self.topics.control)

    async def create(self, topic: str, partitions: int, **config: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        (future,) = admin.create_topics([NewTopic(topic, partitions, 1, config=config)]).values()
        await asyncio.to_thread(future.result, 30)

    async def delete(self, topic: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        (future,) = admin.delete_topics([topic]).values()
        await asyncio.to_thread(future.result, 30)

    async def topic_names(self) -> set[str]:
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        return set((await asyncio.to_thread(admin.list_topics, timeout=30)).topics)

    async def read(
        self, topics: Iterable[str], enough: Any, seconds: float = 60, grace: float = 0.5, **consumer: Any
    ) -> list[Message]:
        """All messages of these topics from their beginning, once `enough(messages)` is true.

        Afterwards it reads `grace` seconds longer: what comes too often must be seen.
        """
        return await asyncio.to_thread(self._read, list(topics), enough, seconds, grace, consumer)

    def _read(
        self, topics: list[str], enough: Any, seconds: float, longer: float, options: dict[str, Any]
    ) -> list[Message]:
        import time

        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": f"{self.name}-reader",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 50,
                **options,
            }
        )
        found: list[Message] = []
        until, grace = time.monotonic() + seconds, None
        assigned: set[str] = set()
        try:
            while time.monotonic() < until:
                missing = set(topics) - assigned
                if missing:
                    known = consumer.list_topics(timeout=30).topics
                    ready = {t for t in missing if t in known and known[t].partitions}
                    if ready:
                        assigned |= ready
                        consumer.incremental_assign(
                            [TopicPartition(t, p, 0) for t in ready for p in known[t].partitions]
                        )
                for message in consumer.consume(500, 0.1):
                    if message.error() is None:
                        found.append(
                            Message(
                                message.topic(),
                                message.partition(),
                                message.offset(),
                                message.key(),
                                message.value(),
                                message.headers() or [],
                                message.timestamp()[1],
                            )
                        )
                if grace is None and not missing and enough(found):
                    grace = time.monotonic() + longer
                if grace is not None and time.monotonic() >= grace:
                    return found
        finally:
            consumer.close()
        raise AssertionError(f"after {seconds} s: {len(found)} messages, topics missing: {missing}")

    async def answers(
        self, topics: Iterable[str], count: int, seconds: float = 60, grace: float = 0.5
    ) -> dict[str, list[Message]]:
        """Events by request id, once `count` requests have their terminal event."""

        def enough(found: list[Message]) -> bool:
            ended = {m.key for m in found if dict(m.headers).get("plait-type") in (b"done", b"error")}
            return len(ended) >= count

        result: dict[str, list[Message]] = {}
        for message in await self.read(topics, enough, seconds, grace):
            result.setdefault((message.key or b"").decode(), []).append(message)
        return result

    async def members(self, count: int) -> None:
        """Wait until the group has so many members, and is at rest."""
        async with asyncio.timeout(60):
            while True:
                group = await self._group()
                if len(group.members) == count and group.state.name == "STABLE":
                    return
                await asyncio.sleep(0.1)

    async def assignment(self) -> dict[str, set[int]]:
        """Which partitions of the requests topic each static member has."""
        return {
            member.group_instance_id: {tp.partition for tp in member.assignment.topic_partitions}
            for member in (await self._group()).members
        }

    async def _group(self) -> ConsumerGroupDescription:
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        (future,) = admin.describe_consumer_groups([self.name]).values()
        return await asyncio.to_thread(future.result, 30)

    async def committed(self) -> dict[int, int]:
        """Committed offsets of the requests topic, by partition."""
        return {partition: offset for partition, (offset, _) in (await self.committed_metadata()).items()}

    async def marked(self, offset: int, attempts: int) -> None:
        """Wait until a commit says that the record there is being attempted for so many times."""
        async with asyncio.timeout(60):
            while True:
                found = [decode(*pair) for pair in (await self.committed_metadata()).values()]
                marks = [progress.marks.get(offset) for progress in found if progress is not None]
                if any(mark is not None and mark.attempts == attempts for mark in marks):
                    return
                await asyncio.sleep(0.05)

    async def committed_metadata(self) -> dict[int, tuple[int, str]]:
        """Committed offsets of the requests topic, and what is beside them, by partition."""

        def ask() -> dict[int, tuple[int, str]]:
            consumer = Consumer({"bootstrap.servers": self.bootstrap_servers, "group.id": self.name})
            try:
                partitions = (
                    consumer.list_topics(self.topics.requests, 30).topics[self.topics.requests].partitions
                )
                asked = [TopicPartition(self.topics.requests, p) for p in partitions]
                found = consumer.committed(asked, 30)
                return {tp.partition: (tp.offset, tp.metadata or "") for tp in found if tp.offset >= 0}
            finally:
                consumer.close()

        return await asyncio.to_thread(ask)


def request(request_id: str, kind: str = "json", **fields: Any) -> tuple[bytes, list[tuple[str, Any]]]:
    """A request as a producer without plait would write it."""
    content = {"v": 1, "request_id": request_id, "prompt": f"say {request_id}"} | fields
    if kind == "json":
        return json.dumps(content).encode(), [("content-type", b"application/json")]
    return msgpack.packb(content), [("content-type", b"application/msgpack")]


def assert_answered_once(messages: list[Message]) -> Event:
    """In order, no gap, no duplicate, one terminal event, which is returned."""
    events = [m.event() for m in messages]
    assert [e.index for e in events] == list(range(len(events)))
    assert [e.type for e in events[:-1]] == ["tokens"] * (len(events) - 1)
    assert events[-1].type in ("done", "error")
    return events[-1]
