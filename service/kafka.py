"""What every Kafka client of the worker shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    InvalidTopicError,
    KafkaError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
)
from aiokafka.helpers import create_ssl_context

from plait.service.settings import KafkaSettings

# A send that failed with one of these fails again; all others are the broker's or the network's state.
PERMANENT = (
    ClusterAuthorizationFailedError,
    InvalidTopicError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
)


@dataclass(frozen=True)
class Unreadable:
    """Stands for a record that aiokafka cannot decode (a header's name that is not UTF-8): where it is."""

    topic: str
    partition: int
    offset: int
    error: str
    timestamp: int = -1
    key: None = None
    value: None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()


async def step(consumer: Any, timeout_ms: int) -> tuple[dict[TopicPartition, list[Any]], bool]:
    """One record per partition that is not paused, where polling raises UnicodeDecodeError.

    A record that aiokafka cannot decode, and would stop at for ever, is stepped over, and stands in the result
    as Unreadable; whether there was one is the second value. Those behind it in its batch share its fate:
    aiokafka decodes a batch from its beginning. Each idle partition takes `timeout_ms`.
    """
    batch: dict[TopicPartition, list[Any]] = {}
    found = False
    for tp in consumer.assignment() - consumer.paused():
        try:
            batch |= await consumer.getmany(tp, timeout_ms=timeout_ms, max_records=1)
        except UnicodeDecodeError as error:
            offset = await consumer.position(tp)
            consumer.seek(tp, offset + 1)
            batch[tp] = [Unreadable(tp.topic, tp.partition, offset, str(error))]
            found = True
    return batch, found


def connection(settings: KafkaSettings, role: str) -> dict[str, Any]:
    """Keyword arguments of any aiokafka client. `role` tells the clients of one worker apart."""
    result: dict[str, Any] = {
        "bootstrap_servers": settings.bootstrap_servers,
        "client_id": f"{settings.client_id}-{role}",
        "security_protocol": settings.security_protocol,
        "request_timeout_ms": settings.request_timeout_ms,
    }
    if settings.security_protocol.startswith("SASL"):
        password = settings.sasl_password
        result |= {
            "sasl_mechanism": settings.sasl_mechanism,
            "sasl_plain_username": settings.sasl_username,
            "sasl_plain_password": password.get_secret_value() if password else None,
        }
    if settings.security_protocol.endswith("SSL"):
        cafile = str(settings.ssl_cafile) if settings.ssl_cafile else None
        result["ssl_context"] = create_ssl_context(cafile=cafile)
    return result


def say(error: BaseException) -> str:
    """An error in one line; aiokafka's often have no text of their own."""
    text = str(error)
    name = type(error).__name__
    return text if isinstance(error, KafkaError) and name in text else f"{name}: {text}" if text else name
