"""Topics that the worker makes: its own where they are missing, and the response topics of requests."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import (
    InvalidReplicationFactorError,
    KafkaError,
    NoError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.metadata import MetadataRequest

from plait.service.kafka import connection, say
from plait.service.metrics import Metrics
from plait.service.publisher import MAX_REQUEST_BYTES, PublishFailed
from plait.service.settings import Settings, TopicSettings

log = logging.getLogger(__name__)

Wanted = dict[str, tuple[int, dict[str, str]]]  # partitions and configuration by name

KNOWN_TOPICS = 10_000
RETRY_BACKOFF_S = 0.5


class TopicUnavailable(PublishFailed):
    """A response topic that does not exist and cannot be made; the text says why."""


class Topics:
    """Makes topics in batches: what is asked for while one request to the broker runs goes into the next."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings.topics
        self._kafka = settings.kafka
        self._metrics = metrics
        self._allowed = re.compile(settings.topics.named_responses)
        self._replication = settings.topics.replication_factor
        self._known: OrderedDict[str, None] = OrderedDict()
        self._wanted: dict[str, asyncio.Future[bool]] = {}
        self._made: set[str] = set()
        self._making: asyncio.Task[None] | None = None
        self.admin: Any = None

    async def start(self) -> None:
        """Connect and make the worker's own topics. Raises KafkaError."""
        admin = AIOKafkaAdminClient(**connection(self._kafka, "admin"), retry_backoff_ms=50)
        try:
            await admin.start()
        except BaseException:
            await admin.close()
            raise
        self.admin = admin
        if self._settings.create:
            await create_own(admin, self._settings)

    async def stop(self) -> None:
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait([self._making])
        for future in self._wanted.values():
            future.cancel()
        if self.admin is not None:
            await self.admin.close()

    def of(self, request_id: str) -> str:
        """The response topic of a request that names none."""
        return self._settings.responses_prefix + request_id

    def is_own(self, topic: str) -> bool:
        """Whether this is one of plait's topics that are no response topics, or one of Kafka's own."""
        return topic.startswith("__") or topic in (
            self._settings.control,
            self._settings.dlq,
            *(lane.topic for lane in self._settings.all_lanes()),
        )

    def may_be_named(self, topic: str, request_id: str) -> bool:
        """Whether a request may ask for its answer there: not on the topic of another request, nor outside of what
        `topics.named_responses` allows."""
        if self.is_per_request(topic):
            return topic == self.of(request_id)
        return not self.is_own(topic) and self._allowed.fullmatch(topic) is not None

    def is_per_request(self, topic: str) -> bool:
        return topic.startswith(self._settings.responses_prefix)

    async def prepare(self, topic: str) -> bool:
        """Make sure that a response topic exists; whether it was made for it. Raises TopicUnavailable; waits
        while no broker answers."""
        if topic in self._known:
            self._known.move_to_end(topic)
            return False
        future = self._wanted.get(topic)
        if future is None:
            future = self._wanted[topic] = asyncio.get_running_loop().create_future()
            if self._making is None or self._making.done():
                self._making = asyncio.create_task(self._make_wanted(), name="plait-make-topics")
        return await asyncio.shield(future)

    def forget(self, topic: str) -> None:
        """The topic may be gone: ask the broker again before the next use."""
        self._known.pop(topic, None)

    async def _make_wanted(self) -> None:
        while self._wanted:
            batch = list(self._wanted)
            try:
                results = await self._settle(batch)
            except (KafkaError, OSError, AttributeError) as error:
                # aiokafka's admin client has no controller to ask while it reconnects: an AttributeError.
                log.warning("making response topics, trying again: %s", say(error))
                results = {}
            except Exception as error:
                log.exception("making response topics")
                results = dict.fromkeys(batch, say(error))
            for topic, problem in results.items():
                self._answer(topic, problem)
            if len(results) < len(batch):
                await asyncio.sleep(RETRY_BACKOFF_S)

    def _answer(self, topic: str, problem: str | None) -> None:
        future = self._wanted.pop(topic)
        made = topic in self._made
        self._made.discard(topic)
        if problem is None:
            self._remember(topic)
        if future.done():
            return
        if problem is None:
            future.set_result(made)
        else:
            future.set_exception(TopicUnavailable(f"response topic {topic}: {problem}"))
            future.exception()

    async def _settle(self, topics: list[str]) -> dict[str, str | None]:
        """Per topic None when it exists now, or why it does not; without those to be asked for again."""
        retention = {"retention.ms": str(self._settings.response_retention_ms)}
        wanted: Wanted = {}
        for topic in topics:
            if self.is_per_request(topic):
                wanted[topic] = (1, retention)
            elif self._settings.create_named_responses:
                wanted[topic] = (1, {})
        errors: dict[str, tuple[Any, str]] = {}
        if wanted:
            errors, self._replication = await create(self.admin, wanted, self._replication)
        results: dict[str, str | None] = {}
        for topic in topics:
            error, _ = errors.get(topic, (None, ""))
            if error is NoError:
                self._made.add(topic)
                self._metrics.response_topics.labels(action="created").inc()
            if error in (NoError, TopicAlreadyExistsError):
                results[topic] = None
        doubtful = [topic for topic in topics if topic not in results]
        found = await self._existing(doubtful) if doubtful else {}
        for topic in doubtful:
            state = found.get(topic, UnknownTopicOrPartitionError)
            error, text = errors.get(topic, (state, ""))
            if state is NoError:
                results[topic] = None
            elif error.retriable and error is not UnknownTopicOrPartitionError:
                log.warning("response topic %s is not there yet: %s", topic, error.__name__)
            else:
                missing = error is UnknownTopicOrPartitionError
                results[topic] = "does not exist" if missing else f"{error.__name__} {text}".strip()
        return results

    async def _existing(self, topics: list[str]) -> dict[str, Any]:
        """Error classes by topic, without making the broker create any."""
        response = await self.admin._send_request(MetadataRequest(topics, allow_auto_topic_creation=False))
        return {entry["topic"]: for_code(entry["error_code"]) for entry in response.to_object()["topics"]}

    def _remember(self, topic: str) -> None:
        self._known[topic] = None
        while len(self._known) > KNOWN_TOPICS:
            self._known.popitem(last=False)


async def create(admin: Any, topics: Wanted, replication: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """Error classes and the broker's words by topic, and the replication factor that the broker took."""
    wanted = []
    for name, (partitions, config) in topics.items():
        topic = NewTopic(name, partitions, 1, topic_configs=config)
        topic.replication_factor = replication  # the constructor takes no -1, brokers do (KIP-464)
        wanted.append(topic)
    response = await admin.create_topics(wanted)
    errors = {name: (for_code(code), text or "") for name, code, text in response.topic_errors}
    if replication < 0 and any(error is InvalidReplicationFactorError for error, _ in errors.values()):
        log.info("the broker knows no default replication factor: making topics with one replica")
        return await create(admin, topics, 1)
    return errors, replication


async def create_own(admin: Any, settings: TopicSettings) -> list[str]:
    """Make the lanes', control and dead-letter topics that are missing; returns those made. Raises
    KafkaError."""
    own: Wanted = {
        **{lane.topic: (settings.request_partitions, {}) for lane in settings.all_lanes()},
        settings.control: (1, {}),
        # A dead letter is a message as large as a broker takes, and headers.
        settings.dlq: (1, {"max.message.bytes": str(MAX_REQUEST_BYTES)}),
    }
    errors, _ = await create(admin, own, settings.replication_factor)
    for topic, (error, text) in errors.items():
        if error not in (NoError, TopicAlreadyExistsError):
            raise error(f"topic {topic} could not be made: {text}")
    return [topic for topic, (error, _) in errors.items() if error is NoError]
