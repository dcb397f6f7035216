"""Reads the control topic: every worker all of it, without a group, from the end at its start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError

from plait.schemas import WireError, decode_control, headers
from plait.service.kafka import connection, say, step
from plait.service.metrics import Metrics
from plait.service.settings import Settings
from plait.service.telemetry import header_text

log = logging.getLogger(__name__)

POLL_MS = 500
RETRY_BACKOFF_S = 1.0
MAX_FAILED_POLLS = 5
CLOSE_TIMEOUT_S = 5.0


class Control:
    """Calls `on_cancel(request_id)` for each cancellation. A message that is none is logged and counted, not
    dead-lettered: every worker reads it, and each would put a copy there."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        on_cancel: Callable[[str], None],
        make_consumer: Callable[..., Any] = AIOKafkaConsumer,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._on_cancel = on_cancel
        self._make_consumer = make_consumer
        self._consumer: Any = None
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Read until cancelled. A consumer that keeps failing is replaced, and goes on where it was."""
        positions: dict[Any, int] = {}
        failed = 0
        while True:
            try:
                if self._consumer is None:
                    await self._open(positions)
                    self.ready.set()
                batch = await self._poll(positions)
                failed = 0
            except (KafkaError, OSError) as error:
                failed += 1
                log.warning("reading the control topic, trying again: %s", say(error))
                await asyncio.sleep(RETRY_BACKOFF_S)
                if failed >= MAX_FAILED_POLLS:
                    failed = 0
                    await self.close()
                continue
            for partition, records in batch.items():
                for record in records:
                    self._take(record)
                positions[partition] = records[-1].offset + 1

    async def _poll(self, positions: dict[Any, int]) -> dict[Any, list[Any]]:
        try:
            return await self._consumer.getmany(timeout_ms=POLL_MS)  # type: ignore[no-any-return]
        except UnicodeDecodeError:
            for partition, offset in positions.items():
                self._consumer.seek(partition, offset)
            return (await step(self._consumer, POLL_MS))[0]

    async def close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await consumer.stop()
            except (KafkaError, TimeoutError) as error:
                log.warning("closing the consumer of the control topic: %s", say(error))

    async def _open(self, positions: dict[Any, int]) -> None:
        kafka = self._settings.kafka
        consumer = self._make_consumer(
            self._settings.topics.control,
            **connection(kafka, "control"),
            auto_offset_reset="latest",
            fetch_max_wait_ms=kafka.fetch_max_wait_ms,
        )
        try:
            await consumer.start()
            for partition in consumer.assignment():
                if partition in positions:
                    consumer.seek(partition, positions[partition])
                else:
                    # Now, not at the first fetch: a cancellation sent meanwhile must not be missed.
                    await consumer.seek_to_end(partition)
                    positions[partition] = await consumer.position(partition)
        except BaseException:
            await consumer.stop()
            raise
        self._consumer = consumer

    def _take(self, record: Any) -> None:
        try:
            cancel = decode_control(record.value, header_text(record.headers, headers.CONTENT_TYPE))
        except WireError as error:
            self._metrics.control.labels(kind="unreadable").inc()
            log.warning("a control message at offset %d cannot be read: %s", record.offset, error)
            return
        self._metrics.control.labels(kind=cancel.type).inc()
        self._on_cancel(cancel.request_id)
