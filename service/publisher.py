"""Durable publishing: an idempotent producer with acks=all, and per request an outbox that keeps order."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.protocol.produce import ProduceRequest

from plait.service.kafka import PERMANENT, connection, partition_of, say
from plait.service.membership import Membership
from plait.service.metrics import Metrics
from plait.service.settings import Settings

log = logging.getLogger(__name__)

RETRY_BACKOFF_S = 0.2
IDLE_TOPICS = 1000
# A dead letter is a message as large as the broker takes, and its headers.
MAX_REQUEST_BYTES = 16 * 1024 * 1024


class NotAMember(KafkaError):  # type: ignore[misc]
    """A batch was held back: the group may have given our partitions away."""


class PublishFailed(Exception):
    """A message that this broker will never take; the text says why."""


class Sends(Protocol):
    """What an outbox needs of a producer."""

    async def send(
        self, topic: str, value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes | None]]
    ) -> tuple[Any, asyncio.Future[Any]]: ...

    async def renew(self, failed: Any) -> None: ...


class Publisher:
    """The worker's producer.

    Nothing leaves it while the membership in the group has expired: what is new waits, what it still held fails, and
    is sent again by those requests that are still ours. It is replaced when a batch of it has failed for good: the
    broker expects the lost batch's sequence numbers next, and would refuse all later ones (KIP-98).
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        membership: Membership,
        make_producer: Callable[..., Any] = AIOKafkaProducer,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._membership = membership
        self._make_producer = make_producer
        self._producer: Any = None
        self._renewing = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._users: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()

    async def start(self) -> None:
        """Raises KafkaError when no broker is reachable."""
        self._producer = await self._new_producer()

    async def flush(self) -> None:
        """Wait until all that was handed over is delivered, or has failed."""
        if self._producer is not None:
            await self._producer.flush()

    async def stop(self) -> None:
        """Deliver what was handed over, then close."""
        if self._producer is not None:
            await self._producer.stop()
        if self._closing:
            await asyncio.wait(self._closing)

    async def send(
        self, topic: str, value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes | None]]
    ) -> tuple[Any, asyncio.Future[Any]]:
        """Hand over a message; waits only when the producer's buffer for the partition is full.

        Returns the producer that took it, and a future of its delivery. Raises KafkaError.
        """
        await self._membership.valid()
        producer = self._producer
        return producer, await producer.send(topic, value, key=key, headers=headers)

    async def renew(self, failed: Any) -> None:
        """Replace the producer that failed; does nothing when that was done already, or when no broker takes
        a new one yet."""
        async with self._renewing:
            if self._producer is not failed:
                return
            try:
                fresh = await self._new_producer()
            except KafkaError as error:
                log.warning("no new producer yet: %s", say(error))
                return
            self._producer = fresh
            for topic in [*self._users, *self._idle]:
                fresh.client.add_topic(topic)
            log.warning("the producer was replaced after a failed delivery")
            task = asyncio.create_task(self._close(failed))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def warm(self, topic: str) -> None:
        """Fetch a topic's metadata, so that the first send need not wait for it."""
        track(self._producer, topic)
        await self._producer.partitions_for(topic)

    def retain(self, topic: str) -> None:
        """A request is going to publish to this topic."""
        self._users[topic] = self._users.get(topic, 0) + 1
        self._idle.pop(topic, None)

    def release(self, topic: str, *, forget: bool) -> None:
        """The request has published all. With `forget`, the topic's metadata is no longer refreshed."""
        self._users[topic] -= 1
        if self._users[topic]:
            return
        del self._users[topic]
        if not forget:
            self._idle[topic] = None
        while len(self._idle) > IDLE_TOPICS:
            self._drop(self._idle.popitem(last=False)[0])
        if forget:
            self._drop(topic)

    def in_use(self, topic: str) -> bool:
        """Whether a request is going to publish to this topic."""
        return topic in self._users

    def forget_sequences(self, topics: Iterable[str]) -> None:
        """These topics are gone: drop the sequence numbers that the producer keeps for them."""
        sequences, gone = self._producer._txn_manager._sequence_numbers, set(topics)
        for partition in [tp for tp in sequences if tp.topic in gone]:
            del sequences[partition]

    def _drop(self, topic: str) -> None:
        # aiokafka never forgets a topic it has sent to, and asks for all of them at every metadata update.
        self._producer.client._topics.discard(topic)

    async def _new_producer(self) -> Any:
        producer = self._make_producer(
            **connection(self._settings.kafka, "producer"),
            acks="all",
            enable_idempotence=True,
            max_request_size=MAX_REQUEST_BYTES,
            linger_ms=0,
            retry_backoff_ms=50,
            partitioner=partition_of,
        )
        try:
            await producer.start()
        except BaseException:
            await producer.stop()
            raise
        producer.client.add_topic(self._settings.topics.dlq)
        self._guard(producer.client)
        return producer

    def _guard(self, client: Any) -> None:
        """Look at the membership once more where batches leave for the broker: they can have waited."""
        send = client.send

        async def send_if_member(node_id: Any, request: Any, **options: Any) -> Any:
            if isinstance(request, ProduceRequest) and self._membership.expired:
                raise NotAMember("no word from the group's coordinator for the session timeout")
            return await send(node_id, request, **options)

        client.send = send_if_member

    async def _close(self, producer: Any) -> None:
        try:
            async with asyncio.timeout(self._settings.kafka.request_timeout_ms / 1000):
                await producer.stop()
        except (KafkaError, TimeoutError) as error:
            log.warning("closing a replaced producer: %s", say(error))


@dataclass(slots=True)
class _Message:
    value: bytes
    headers: list[tuple[str, bytes | None]]
    producer: Any = None
    delivery: asyncio.Future[Any] | None = None
    error: BaseException | None = None

    def failure(self) -> BaseException | None:
        if self.error is not None:
            return self.error
        if self.delivery is not None and self.delivery.done() and not self.delivery.cancelled():
            return self.delivery.exception()
        return None


class Outbox:
    """The events of one request, delivered in order to one topic and key.

    A failed delivery is tried again until it succeeds, with everything after it, so that an event may be
    written twice but never out of order or not at all; readers take each `index` once.
    """

    def __init__(
        self,
        publisher: Sends,
        metrics: Metrics,
        topic: str,
        key: bytes,
        ensure_topic: Callable[[], Awaitable[None]],
    ) -> None:
        self.topic = topic
        self._publisher = publisher
        self._metrics = metrics
        self._key = key
        self._ensure_topic = ensure_topic
        self._sent = 0
        self._unacknowledged: deque[_Message] = deque()

    @property
    def delivered(self) -> int:
        """How many events the broker has acknowledged."""
        return self._sent - len(self._unacknowledged)

    async def put(self, value: bytes, headers: list[tuple[str, bytes | None]]) -> None:
        """Hand an event over without waiting for its delivery. Raises PublishFailed."""
        self._drop_delivered()
        if self._unacknowledged and self._unacknowledged[0].failure():
            await self._recover()
        message = _Message(value, headers)
        self._unacknowledged.append(message)
        self._sent += 1
        if not await self._send(message):
            await self._recover()

    async def flush(self) -> None:
        """Wait until everything is delivered. Raises PublishFailed."""
        while self._unacknowledged:
            delivery = self._unacknowledged[0].delivery
            if delivery is not None:
                await asyncio.wait([delivery])
            if self._unacknowledged[0].failure():
                await self._recover()
            self._drop_delivered()

    async def give_up(self) -> None:
        """Wait until the producer is done with what it holds, and forget what it could not deliver."""
        await self._settle()
        self.discard()

    def discard(self) -> None:
        """Give up what is not delivered yet; what the producer holds may still be written."""
        self._sent = self.delivered
        for message in self._unacknowledged:
            if message.delivery is not None:
                message.delivery.add_done_callback(take_exception)
        self._unacknowledged.clear()

    def _drop_delivered(self) -> None:
        waiting = self._unacknowledged
        while waiting and (first := waiting[0].delivery) is not None and first.done():
            if waiting[0].failure():
                return
            waiting.popleft()

    async def _send(self, message: _Message) -> bool:
        message.error = None
        try:
            message.producer, message.delivery = await self._publisher.send(
                self.topic, message.value, self._key, message.headers
            )
            message.delivery.add_done_callback(take_exception)
        except KafkaError as error:
            message.producer, message.delivery, message.error = None, None, error
        return message.error is None

    async def _settle(self) -> None:
        deliveries = [m.delivery for m in self._unacknowledged if m.delivery is not None]
        if deliveries:
            await asyncio.wait(deliveries)
        self._drop_delivered()

    async def _recover(self) -> None:
        """Send the first undelivered message and all after it again, until the producer has them."""
        while True:
            await self._settle()
            if not self._unacknowledged:
                return
            first = self._unacknowledged[0]
            error = first.failure()
            if isinstance(error, PERMANENT):
                self._metrics.publish_errors.labels(retried="no").inc()
                if first.producer is not None:
                    await self._publisher.renew(first.producer)
                size = len(first.value)
                raise PublishFailed(f"{self.topic} refused an event of {size} bytes: {say(error)}") from error
            self._metrics.publish_errors.labels(retried="yes").inc()
            log.warning(
                "an event to %s was not delivered, trying again: %s", self.topic, error and say(error)
            )
            await asyncio.sleep(RETRY_BACKOFF_S)
            await self._ensure_topic()
            if first.producer is not None:
                await self._publisher.renew(first.producer)
            for message in self._unacknowledged:
                if not await self._send(message):
                    break
            else:
                return


def track(producer: Any, topic: str) -> None:
    """Have the producer ask for this topic at every metadata update. aiokafka does so by itself only for topics that it
    did not know when they were first sent to; at its start it knows all, and the next update forgets the others, with
    which a batch for one of them has no leader."""
    producer.client.add_topic(topic)


def take_exception(future: asyncio.Future[Any]) -> None:
    """For futures whose failure is looked at later: asyncio would report it as never retrieved."""
    if not future.cancelled():
        future.exception()
