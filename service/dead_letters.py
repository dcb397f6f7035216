"""The dead-letter topic: messages that nobody can be answered for, byte for byte, and why."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiokafka.errors import KafkaError, MessageSizeTooLargeError, RecordListTooLargeError

from plait.schemas import headers as wire
from plait.service.kafka import say
from plait.service.metrics import Metrics
from plait.service.publisher import Publisher

log = logging.getLogger(__name__)

RETRY_BACKOFF_S = 1.0
MAX_REASON = 1000
# Says that the value was left out because the dead-letter topic takes no message so large, and its size.
VALUE_OMITTED = "plait-dlq-value-omitted"


class DeadLetters:
    """Puts records into the dead-letter topic: key, value and headers untouched, and headers of its own."""

    def __init__(self, publisher: Publisher, topic: str, metrics: Metrics) -> None:
        self._publisher = publisher
        self._topic = topic
        self._metrics = metrics

    async def put(self, record: Any, kind: str, reason: str) -> None:
        """Returns once the dead letter is durable, however long that takes.

        `kind` is a short word for the metric. A record that is too large for the topic goes without its
        value; its origin in the headers says where to find it.
        """
        log.warning("dead letter: %s[%d]@%d: %s", record.topic, record.partition, record.offset, reason)
        headers: list[tuple[str, bytes | None]] = [
            *record.headers,
            (wire.DLQ_REASON, reason[:MAX_REASON].encode(errors="replace")),
            (wire.DLQ_TOPIC, record.topic.encode()),
            (wire.DLQ_PARTITION, str(record.partition).encode()),
            (wire.DLQ_OFFSET, str(record.offset).encode()),
            (wire.DLQ_TIMESTAMP, str(record.timestamp).encode()),
        ]
        value, key = record.value, record.key
        while True:
            producer = None
            try:
                # aiokafka takes no message without key and value.
                sent_key = b"" if key is None and value is None else key
                producer, delivery = await self._publisher.send(self._topic, value, sent_key, headers)
                await delivery
                break
            except KafkaError as error:
                too_large = isinstance(error, MessageSizeTooLargeError | RecordListTooLargeError)
                self._metrics.publish_errors.labels(retried="yes").inc()
                log.error("the dead letter was not delivered, trying again: %s", say(error))
                if producer is not None:
                    await self._publisher.renew(producer)
                if too_large and value is not None:
                    headers.append((VALUE_OMITTED, str(len(value)).encode()))
                    value = None
                else:
                    await asyncio.sleep(RETRY_BACKOFF_S)
        self._metrics.dead_letters.labels(reason=kind).inc()
