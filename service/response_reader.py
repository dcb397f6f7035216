"""One consumer for all of a client's streams: hands every event to the stream of its request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from plait.schemas import DoneEvent, ErrorEvent, Event, decode_event, headers
from plait.service.event_order import EventOrder, Forgotten
from plait.service.positions import Position

log = logging.getLogger(__name__)
_STOP_S = 2.0


@dataclass(slots=True)
class Inbox:
    """What has arrived for one request, each event with the position behind it. `gap_since` is the monotonic time
    since which an event is missing, `start` the offset of the request's first event."""

    request_id: str
    order: EventOrder = field(default_factory=EventOrder)
    events: asyncio.Queue[tuple[Event, Position]] = field(default_factory=asyncio.Queue)
    gap_since: float | None = None
    start: int | None = None
    elsewhere: bool = False  # the request's own topic is read too, though another was named
    skip: int = 0  # events that were delivered before they were read again
    _offsets: dict[int, int] = field(default_factory=dict)  # of events that are not delivered, by index

    @classmethod
    def at(cls, position: Position) -> Self:
        """An inbox that goes on behind a position."""
        if position.replay:
            return cls(position.request_id, skip=position.delivered, start=position.start)
        order = EventOrder(position.index, position.epoch, position.delivered)
        return cls(position.request_id, order, start=position.start)

    def put(self, event: Event, tp: TopicPartition, offset: int) -> None:
        """Raises Forgotten when the events from `start` on are needed again; the inbox is ready for them then."""
        before = self.order.next
        if self.start is None:
            self.start = offset
        try:
            ready = self.order.take(event)
        except Forgotten:
            self.skip, self.order = self.order.delivered, EventOrder()
            self._offsets.clear()
            raise
        self._offsets.setdefault(event.index, offset)
        for fresh, following, cutting in ready:
            if fresh.index >= self.skip:
                # Back to the first of those that came early and are not delivered yet.
                early = [at for index, at in self._offsets.items() if index >= following]
                at = min([offset + 1, *early])
                self.events.put_nowait((fresh, self._behind(fresh, following, at, cutting, tp)))
        self._offsets = {index: at for index, at in self._offsets.items() if index >= self.order.next}
        if not self.order.gap:
            self.gap_since = None
        elif self.gap_since is None or self.order.next != before:
            self.gap_since = time.monotonic()

    def _behind(
        self, event: Event, following: int, offset: int, replay: bool, tp: TopicPartition
    ) -> Position:
        return Position(
            request_id=self.request_id,
            topic=tp.topic,
            partition=tp.partition,
            start=self.start or 0,
            offset=offset,
            index=following,
            epoch=self.order.epoch,
            delivered=event.index + 1,
            replay=replay,
            ended=isinstance(event, DoneEvent | ErrorEvent),
        )


class ResponseReader:
    """Reads response topics without a group, so that nothing is committed and nobody is waited for."""

    def __init__(self, bootstrap_servers: str, kafka: Mapping[str, Any]) -> None:
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap_servers,
            group_id=None,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level="read_committed",
            fetch_max_wait_ms=100,
            **kafka,
        )
        self._inboxes: dict[str, Inbox] = {}
        self._positions: dict[TopicPartition, int] = {}
        self._moves = 0
        self._stopped = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._consumer.start()
        # aiokafka cannot stop a consumer whose tasks have not begun.
        await asyncio.sleep(0)
        self._task = asyncio.create_task(self._read(), name="plait client reader")

    async def stop(self) -> None:
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            # aiokafka's fetcher misses a cancellation while it takes in a new assignment; the second one,
            # by the timeout, reaches it.
            await asyncio.wait_for(self._consumer.stop(), _STOP_S)
        except TimeoutError:
            log.warning("the consumer of responses was left behind: it does not stop")

    def check(self) -> None:
        """Raises what ended the reading, when something did."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    def is_open(self, request_id: str) -> bool:
        return request_id in self._inboxes

    def open(self, request_id: str) -> Inbox:
        """The inbox of a request: the same one until it is closed."""
        return self._inboxes.setdefault(request_id, Inbox(request_id))

    def reopen(self, position: Position) -> Inbox:
        """An inbox for what comes behind a position, and read its partition from there."""
        inbox = self._inboxes[position.request_id] = Inbox.at(position)
        self._back(
            TopicPartition(position.topic, position.partition),
            position.start if position.replay else position.offset,
        )
        return inbox

    def close(self, request_id: str) -> None:
        self._inboxes.pop(request_id, None)

    async def follow(self, partitions: list[TopicPartition], from_end: bool = False) -> None:
        """Also read these partitions, from their beginning or from now on; those known keep their place."""
        new = [p for p in partitions if p not in self._positions]
        starts = await self._consumer.end_offsets(new) if new and from_end else dict.fromkeys(new, 0)
        self._positions.update(starts)
        self._move()

    def forget(self, topic: str) -> None:
        gone = [p for p in self._positions if p.topic == topic]
        for partition in gone:
            del self._positions[partition]
        if gone:
            self._move()

    def rewind(self, topic: str) -> None:
        """Read a topic again from its beginning: streams that already got events drop them as duplicates."""
        for partition in self._positions:
            if partition.topic == topic:
                self._positions[partition] = 0
        self._move()

    def _back(self, partition: TopicPartition, offset: int) -> None:
        """Read a partition again from an offset on, if it is not read from before that anyway."""
        self._positions[partition] = min(offset, self._positions.get(partition, offset))
        self._move()

    def _move(self) -> None:
        self._moves += 1
        if not self._stopped:
            self._assign()

    def _assign(self) -> None:
        self._consumer.assign(list(self._positions))
        for partition, offset in self._positions.items():
            self._consumer.seek(partition, offset)

    async def _read(self) -> None:
        while True:
            moves = self._moves
            try:
                batches = await self._consumer.getmany(timeout_ms=1000)
            except KafkaError as error:
                log.warning("reading responses failed, trying again: %s", error)
                await asyncio.sleep(0.5)
                continue
            if moves != self._moves:
                # What was fetched may be from before the move or from after it: read it again.
                self._assign()
                continue
            for partition, records in batches.items():
                for record in records:
                    self._dispatch(partition, record)
                    if moves != self._moves:
                        break
                else:
                    self._positions[partition] = records[-1].offset + 1
                    continue
                break  # something is to be read again, and so is what is left of this batch
            if not self._positions:
                await asyncio.sleep(0.05)

    def _dispatch(self, partition: TopicPartition, record: ConsumerRecord) -> None:
        inbox = self._inboxes.get((record.key or b"").decode(errors="replace"))
        if inbox is None or record.value is None:
            return
        content_type = next((v for k, v in record.headers if k == headers.CONTENT_TYPE), None)
        try:
            event = decode_event(record.value, content_type.decode() if content_type else None)
        except ValueError as error:
            log.warning(
                "skipping an event that cannot be read at %s@%d: %s", record.topic, record.offset, error
            )
            return
        try:
            inbox.put(event, partition, record.offset)
        except Forgotten:
            self._back(partition, inbox.start or 0)
