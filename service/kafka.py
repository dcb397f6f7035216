"""What every Kafka client of the worker shares."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
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
from aiokafka.partitioner import DefaultPartitioner, murmur2
from pydantic import SecretStr

from plait.service.oauth import make_tokens
from plait.service.settings import KafkaSettings, SettingsError

# A send that failed with one of these fails again; all others are the broker's or the network's state.
PERMANENT = (
    ClusterAuthorizationFailedError,
    InvalidTopicError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
)

LONGEST_KEY = 256
"""Of a key that is remembered, in bytes: as long as a request's may be, and not as long as any dead letter's."""


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


@lru_cache(maxsize=10_000)
def _hash(key: bytes) -> int:
    return int(murmur2(key)) & 0x7FFFFFFF


def partition_of(key: bytes | None, partitions: list[int], available: list[int]) -> int:
    """aiokafka's partitioner, which puts a key where Kafka's own producers put it, with a memory for the hash: it is
    slow in Python, and each token of a request has the same key."""
    if key is None or len(key) > LONGEST_KEY:
        return int(DefaultPartitioner()(key, partitions, available))
    return partitions[_hash(key) % len(partitions)]


def connection(settings: KafkaSettings, role: str) -> dict[str, Any]:
    """Keyword arguments of any aiokafka client. `role` tells the clients of one worker apart. Raises SettingsError
    for certificates that cannot be read."""
    result: dict[str, Any] = {
        "bootstrap_servers": settings.bootstrap_servers,
        "client_id": f"{settings.client_id}-{role}",
        "security_protocol": settings.security_protocol,
        "request_timeout_ms": settings.request_timeout_ms,
    }
    if settings.security_protocol.startswith("SASL"):
        result["sasl_mechanism"] = settings.sasl_mechanism
        if settings.sasl_mechanism == "OAUTHBEARER":
            settings._tokens = settings._tokens or make_tokens(settings)
            result["sasl_oauth_token_provider"] = settings._tokens
        else:
            result["sasl_plain_username"] = settings.sasl_username
            result["sasl_plain_password"] = _secret(settings.sasl_password)
    if settings.security_protocol.endswith("SSL"):
        result["ssl_context"] = ssl_context(settings)
    return result


def ssl_context(settings: KafkaSettings) -> ssl.SSLContext:
    """Whom to trust, and with a client certificate who we are. Raises SettingsError, which names the key."""
    for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile"):
        file = getattr(settings, name)
        if file is not None and not file.is_file():
            raise SettingsError(f"kafka.{name}: {file}: no such file")

    def text(file: Path | None) -> str | None:
        return str(file) if file else None

    try:
        context: ssl.SSLContext = create_ssl_context(
            cafile=text(settings.ssl_cafile),
            certfile=text(settings.ssl_certfile),
            keyfile=text(settings.ssl_keyfile),
            password=_secret(settings.ssl_password) or "",  # without one OpenSSL asks on the terminal
        )
    except (ssl.SSLError, OSError) as error:
        raise SettingsError(f"kafka.ssl_cafile, ssl_certfile, ssl_keyfile or ssl_password: {error}") from None
    context.check_hostname = settings.ssl_check_hostname
    return context


def _secret(value: SecretStr | None) -> str | None:
    return value.get_secret_value() if value is not None else None


def say(error: BaseException) -> str:
    """An error in one line; aiokafka's often have no text of their own."""
    text = str(error)
    name = type(error).__name__
    return text if isinstance(error, KafkaError) and name in text else f"{name}: {text}" if text else name
