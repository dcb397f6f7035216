"""Removes response topics after their time to live, also those that a dead worker left behind."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, NoError, UnknownTopicOrPartitionError, for_code

from plait.service.clock import Clock
from plait.service.kafka import connection, say
from plait.service.metrics import Metrics
from plait.service.publisher import Publisher
from plait.service.settings import Settings
from plait.service.topics import Topics

log = logging.getLogger(__name__)

BATCH = 200
MAX_PAUSE_S = 5.0
ASK_MS = 5_000


class Sweeper:
    """Removes a response topic of this worker's `response_ttl_s` after its last request ended.

    Topics under the prefix that this worker knows nothing of belong to other workers, or to one that died.
    They are removed once their newest record is older than `orphan_after_s`, or once they have been seen
    empty for so long.
    """

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        metrics: Metrics,
        clock: Clock,
        publisher: Publisher,
    ) -> None:
        self._settings = settings.topics
        self._kafka = settings.kafka
        self._topics = topics
        self._metrics = metrics
        self._clock = clock
        self._publisher = publisher
        self._expiring: OrderedDict[str, float] = OrderedDict()
        self._seen_empty: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="plait-sweeper")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def schedule(self, topic: str) -> None:
        """A request has ended; its topic's time to live begins, when it is one of the worker's."""
        if self._topics.is_per_request(topic):
            self._expiring[topic] = self._clock.monotonic() + self._settings.response_ttl_s
            self._expiring.move_to_end(topic)

    async def _run(self) -> None:
        next_orphans = self._clock.monotonic()
        pause = min(self._settings.response_ttl_s / 4, self._settings.orphan_after_s / 4, MAX_PAUSE_S)
        while True:
            try:
                await self._remove_expired()
                if self._clock.monotonic() >= next_orphans:
                    next_orphans = self._clock.monotonic() + self._settings.orphan_after_s / 4
                    await self._remove_orphans()
            except (KafkaError, OSError, AttributeError) as error:
                # aiokafka's admin client has no controller to ask while it reconnects: an AttributeError.
                log.warning("removing old response topics: %s", say(error))
            except Exception:
                log.exception("removing old response topics")  # the next round tries again
            await asyncio.sleep(pause)

    async def _remove_expired(self) -> None:
        now = self._clock.monotonic()
        while True:
            due: list[str] = []
            for topic, at in self._expiring.items():
                if at > now or len(due) == BATCH:
                    break
                due.append(topic)
            if not due:
                return
            await self._remove(due)
            for topic in due:
                self._expiring.pop(topic, None)

    async def _remove(self, topics: list[str]) -> None:
        """Delete those of these topics that no request of this worker publishes to."""
        topics = [topic for topic in topics if not self._publisher.in_use(topic)]
        if not topics:
            return
        response = await self._topics.admin.delete_topics(topics)
        for topic, code in response.topic_error_codes:
            error = for_code(code)
            if error is NoError:
                self._metrics.response_topics.labels(action="removed").inc()
            elif error is not UnknownTopicOrPartitionError:
                log.warning("response topic %s was not removed: %s", topic, error.__name__)
            self._topics.forget(topic)
            self._seen_empty.pop(topic, None)
        self._publisher.forget_sequences(topics)

    async def _remove_orphans(self) -> None:
        found = {
            topic
            for topic in await self._topics.admin.list_topics()
            if self._topics.is_per_request(topic)
            and topic not in self._expiring
            and not self._publisher.in_use(topic)
        }
        self._seen_empty = {topic: at for topic, at in self._seen_empty.items() if topic in found}
        unknown = list(found)
        for at in range(0, len(unknown), BATCH):
            stale = await self._stale(unknown[at : at + BATCH])
            if stale:
                log.info("removing %d response topics that a worker left behind", len(stale))
                await self._remove(stale)

    async def _stale(self, topics: list[str]) -> list[str]:
        """Each topic is asked for by itself: aiokafka waits for one that was deleted meanwhile until its timeout."""
        since = max(0, self._clock.wall_ms() - int(self._settings.orphan_after_s * 1000))
        limits = {"request_timeout_ms": min(ASK_MS, self._kafka.request_timeout_ms)}
        reader = AIOKafkaConsumer(**connection(self._kafka, "sweeper") | limits)
        await reader.start()
        try:
            stale = await asyncio.gather(*(self._is_stale(reader, topic, since) for topic in topics))
        finally:
            await reader.stop()
        return [topic for topic, old in zip(topics, stale, strict=True) if old]

    async def _is_stale(self, reader: AIOKafkaConsumer, topic: str, since: int) -> bool:
        partition = TopicPartition(topic, 0)
        try:
            newer = await reader.offsets_for_times({partition: since})
            ends = await reader.end_offsets([partition])
        except KafkaError as error:
            log.info("response topic %s, asked for its newest record: %s", topic, say(error))
            return False
        if newer[partition] is not None:
            return False
        now = self._clock.monotonic()
        empty_since = self._seen_empty.setdefault(topic, now)
        return ends[partition] > 0 or now - empty_since > self._settings.orphan_after_s
