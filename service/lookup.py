"""Reads back what response topics hold of requests that are delivered again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from plait.schemas import decode_event, headers
from plait.service.history import History
from plait.service.kafka import connection, partition_of, say, step
from plait.service.settings import Settings
from plait.service.telemetry import header_text

log = logging.getLogger(__name__)

GATHER_S = 0.05
RETRY_BACKOFF_S = 0.5
POLL_MS = 200
# Clocks of producers and workers differ; an event can seem older than its request by so much.
SKEW_MS = 60_000


@dataclass(eq=False, slots=True)
class Wanted:
    """A request to look up. `since_ms` None: the topic is its own, and read from its beginning."""

    topic: str
    request_id: str
    since_ms: int | None
    found: asyncio.Future[History]
    history: History = field(default_factory=History)


class Lookup:
    """What is asked for while one scan runs goes into the next one: the requests of an assignment come together
    and share it. A scan reads each partition that it needs once, from the oldest request's time stamp to the end."""

    def __init__(self, settings: Settings, make_consumer: Callable[..., Any] = AIOKafkaConsumer) -> None:
        self._settings = settings
        self._make_consumer = make_consumer
        self._wanted: list[Wanted] = []
        self._scanning: asyncio.Task[None] | None = None
        self.scans = 0

    async def find(self, topic: str, request_id: str, since_ms: int | None) -> History:
        """What the topic holds of this request now; waits while no broker answers."""
        wanted = Wanted(topic, request_id, since_ms, asyncio.get_running_loop().create_future())
        self._wanted.append(wanted)
        if self._scanning is None or self._scanning.done():
            self._scanning = asyncio.create_task(self._scan_all(), name="plait-lookup")
        return await wanted.found

    async def stop(self) -> None:
        if self._scanning is not None:
            self._scanning.cancel()
            await asyncio.wait([self._scanning])

    async def _scan_all(self) -> None:
        await asyncio.sleep(GATHER_S)
        while self._wanted:
            batch, self._wanted = self._wanted, []
            batch = [wanted for wanted in batch if not wanted.found.done()]  # the others were cancelled
            for wanted in batch:
                wanted.history = History()
            try:
                await self._scan(batch)
            except (KafkaError, OSError) as error:
                log.warning("looking up what was published, trying again: %s", say(error))
                self._wanted += batch
                await asyncio.sleep(RETRY_BACKOFF_S)
                continue
            except Exception as error:
                for wanted in batch:
                    if not wanted.found.done():
                        wanted.found.set_exception(error)
                continue
            for wanted in batch:
                if not wanted.found.done():
                    wanted.found.set_result(wanted.history)

    async def _scan(self, batch: list[Wanted]) -> None:
        self.scans += 1
        consumer = self._make_consumer(
            **connection(self._settings.kafka, "lookup"),
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            fetch_max_wait_ms=self._settings.kafka.fetch_max_wait_ms,
        )
        await consumer.start()
        try:
            by_partition = await self._locate(consumer, batch)
            consumer.assign(list(by_partition))
            starts = await self._starts(consumer, by_partition)
            ends = await consumer.end_offsets(list(by_partition))
            for tp, start in starts.items():
                consumer.seek(tp, start)
            await self._read(consumer, by_partition, ends)
        finally:
            # aiokafka cannot stop a consumer whose tasks have not begun.
            await asyncio.sleep(0)
            await consumer.stop()

    async def _locate(self, consumer: Any, batch: list[Wanted]) -> dict[TopicPartition, dict[bytes, Wanted]]:
        """The requests by partition, and there by key, as the producer places them."""
        await consumer._client.set_topics([wanted.topic for wanted in batch])
        found: dict[TopicPartition, dict[bytes, Wanted]] = {}
        for wanted in batch:
            partitions = sorted(consumer._client.cluster.partitions_for_topic(wanted.topic) or ())
            if partitions:
                key = wanted.request_id.encode()
                tp = TopicPartition(wanted.topic, partition_of(key, partitions, partitions))
                found.setdefault(tp, {})[key] = wanted
        return found

    async def _starts(
        self, consumer: Any, by_partition: dict[TopicPartition, dict[bytes, Wanted]]
    ) -> dict[TopicPartition, int]:
        starts = await consumer.beginning_offsets(list(by_partition))
        times = {
            tp: max(0, min(w.since_ms for w in requests.values() if w.since_ms is not None) - SKEW_MS)
            for tp, requests in by_partition.items()
            if all(w.since_ms is not None for w in requests.values())
        }
        if times:
            for tp, found in (await consumer.offsets_for_times(times)).items():
                if found is None:
                    (starts[tp],) = (await consumer.end_offsets([tp])).values()
                else:
                    starts[tp] = found.offset
        return starts  # type: ignore[no-any-return]

    async def _read(
        self,
        consumer: Any,
        by_partition: dict[TopicPartition, dict[bytes, Wanted]],
        ends: dict[TopicPartition, int],
    ) -> None:
        left = set(by_partition)
        ends = dict(ends)
        known: set[TopicPartition] = set()
        transactional = self._settings.worker.delivery == "transactional"
        while True:
            for tp in list(left):
                # Behind a transaction of somebody else there may be events that are committed: wait for its end.
                if transactional and tp not in known and (end := consumer.highwater(tp)) is not None:
                    ends[tp] = max(ends[tp], end)
                    known.add(tp)
                if transactional and tp not in known:
                    continue
                if await consumer.position(tp) >= ends[tp]:
                    left.discard(tp)
                    consumer.pause(tp)
            if not left:
                return
            try:
                batch = await consumer.getmany(timeout_ms=POLL_MS)
            except UnicodeDecodeError:
                batch, _ = await step(consumer, POLL_MS)
            for tp, records in batch.items():
                for record in records:
                    wanted = by_partition[tp].get(record.key)
                    if wanted is not None and record.value is not None:
                        self._take(wanted, record)

    def _take(self, wanted: Wanted, record: Any) -> None:
        try:
            event = decode_event(record.value, header_text(record.headers, headers.CONTENT_TYPE))
        except ValueError as error:
            log.warning(
                "%s@%d is no event, though its key is a request's: %s", record.topic, record.offset, error
            )
            return
        if event.request_id == wanted.request_id:
            wanted.history.add(event)
