"""The parts around one stream, in memory: records in, events and dead letters out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgpack
from aiokafka import TopicPartition
from aiokafka.structs import ConsumerRecord
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fakes import FakeEngine
from plait.schemas import Event, decode_event
from plait.service.admission import Admission
from plait.service.cancels import Cancels
from plait.service.claims import Claims
from plait.service.clock import Clock
from plait.service.commit_metadata import Mark, Progress
from plait.service.dead_letters import DeadLetters
from plait.service.history import History
from plait.service.leases import Lease, Partition
from plait.service.metrics import Metrics
from plait.service.settings import Settings
from plait.service.stream import Services, Stream
from plait.service.topics import Topics, TopicUnavailable

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Sent:
    topic: str
    value: bytes | None
    key: bytes | None
    headers: list[tuple[str, bytes | None]]

    def event(self) -> Event:
        content_type = dict(self.headers)["content-type"]
        assert self.value is not None and content_type is not None
        return decode_event(self.value, content_type.decode())


class FakePublisher:
    """Takes the place of Publisher. `script` holds one entry per coming message: None delivers it, an
    exception fails its delivery, a pair ("send", exception) refuses it at once."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.attempts: list[Sent] = []
        self.script: list[Any] = []
        self.renewed = 0
        self.users: dict[str, int] = {}
        self.held: list[asyncio.Future[None]] | None = None

    def hold(self) -> None:
        """Leave deliveries unacknowledged."""
        self.held = []

    async def send(self, topic: str, value: Any, key: Any, headers: Any) -> tuple[Any, asyncio.Future[Any]]:
        message = Sent(topic, value, key, list(headers))
        self.attempts.append(message)
        outcome = self.script.pop(0) if self.script else None
        if isinstance(outcome, tuple):
            raise outcome[1]
        delivery: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if outcome is not None:
            delivery.set_exception(outcome)
            delivery.exception()
            return self, delivery
        self.sent.append(message)
        if self.held is not None:
            self.held.append(delivery)
        else:
            delivery.set_result(None)
        return self, delivery

    async def renew(self, failed: Any) -> None:
        self.renewed += 1

    async def warm(self, topic: str) -> None:
        await asyncio.sleep(0)

    def retain(self, topic: str) -> None:
        self.users[topic] = self.users.get(topic, 0) + 1

    def release(self, topic: str, *, forget: bool) -> None:
        self.users[topic] -= 1


class FakeTopics(Topics):
    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        super().__init__(settings, metrics)
        self.missing: set[str] = set()
        self.old: set[str] = set()  # they exist already
        self.prepared: list[str] = []
        self.answering = asyncio.Event()
        self.answering.set()

    async def prepare(self, topic: str) -> bool:
        await self.answering.wait()
        if topic in self.missing:
            raise TopicUnavailable(f"response topic {topic}: does not exist")
        self.prepared.append(topic)
        return topic not in self.old


class FakeSweeper:
    def __init__(self) -> None:
        self.scheduled: list[str] = []

    def schedule(self, topic: str) -> None:
        self.scheduled.append(topic)


class FakeLookup:
    """What response topics hold, by request id."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}
        self.asked: list[tuple[str, str, int | None]] = []

    async def find(self, topic: str, request_id: str, since_ms: int | None) -> History:
        self.asked.append((topic, request_id, since_ms))
        history = History()
        for event in self.events.get(request_id, []):
            history.add(event)
        return history


@dataclass
class Bench:
    """`await serve(value)` runs one record through a stream."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    settings: Settings = field(default_factory=Settings.load)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.metrics = Metrics()
        self.publisher = FakePublisher()
        self.topics = FakeTopics(self.settings, self.metrics)
        self.sweeper = FakeSweeper()
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.partition = Partition(TopicPartition("plait.requests", 0), epoch=3)
        self.offset = 0
        self.ended: list[Lease] = []
        self.lookup: Any = FakeLookup()
        publisher: Any = self.publisher
        sweeper: Any = self.sweeper
        self.services = Services(
            settings=self.settings,
            engine=self.engine,
            admission=Admission(self.settings, self.engine, self.topics, Claims(self.settings.claims)),
            publisher=publisher,
            topics=self.topics,
            sweeper=sweeper,
            dead_letters=DeadLetters(publisher, self.settings.topics.dlq, self.metrics),
            cancels=Cancels(100, 60, self.clock),
            metrics=self.metrics,
            tracer=self.provider.get_tracer("test"),
            clock=self.clock,
            lookup=self.lookup,
        )

    def record(
        self,
        value: bytes | None,
        headers: list[tuple[str, bytes | None]] | None = None,
        key: bytes | None = b"k",
        timestamp: int | None = None,
    ) -> Any:
        at = self.clock.wall_ms() if timestamp is None else timestamp
        offset, self.offset = self.offset, self.offset + 1
        size = len(value or b"")
        return ConsumerRecord(
            "plait.requests", 0, offset, at, 0, key, value, None, 1, size, tuple(headers or [])
        )

    def start(self, value: bytes | None, headers: Any = None, **record: Any) -> Stream:
        message = self.record(value, headers, **record)
        self.partition.tracker.deliver(message.offset)
        lease = Lease(self.partition, message.offset, len(value or b""), self.ended.append)
        stream = Stream(self.services, message, lease)
        stream.start()
        return stream

    def redeliver(
        self, value: bytes, events: Iterable[Event], mark: Mark | None = None, **record: Any
    ) -> Stream:
        """A record that an earlier owner of the partition may have begun to answer, with these events."""
        request_id = (
            json.loads(value)["request_id"] if value[:1] == b"{" else msgpack.unpackb(value)["request_id"]
        )
        self.lookup.events[request_id] = list(events)
        self.topics.old.add(f"plait.responses.{request_id}")
        at, self.partition = self.offset, Partition(self.partition.topic_partition, self.partition.epoch + 1)
        marks = {at: mark} if mark else {}
        self.partition.restore(at, Progress(at + 1, self.partition.epoch, (), marks), at + 1)
        return self.start(value, **record)

    async def serve(self, value: bytes | None, headers: Any = None, **record: Any) -> list[Event]:
        """The events that the record is answered with."""
        before = len(self.publisher.sent)
        stream = self.start(value, headers, **record)
        assert stream.task is not None
        await stream.task
        dlq = self.settings.topics.dlq
        return [sent.event() for sent in self.publisher.sent[before:] if sent.topic != dlq]

    def events(self) -> list[Event]:
        return [m.event() for m in self.publisher.sent if m.topic != self.settings.topics.dlq]

    def dead_letters(self) -> list[Sent]:
        return [m for m in self.publisher.sent if m.topic == self.settings.topics.dlq]

    def spans(self) -> dict[str, list[ReadableSpan]]:
        result: dict[str, list[ReadableSpan]] = {}
        for span in self.exporter.get_finished_spans():
            result.setdefault(span.name, []).append(span)
        return result

    def process_span(self) -> ReadableSpan:
        (span,) = self.spans()["process plait.requests"]
        return span


async def until(condition: Any, seconds: float = 10) -> None:
    """Let the event loop run until the condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 conditions of any kind
            await asyncio.sleep(0.001)
