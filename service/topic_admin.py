"""What an operator wants to know of plait's topics, and to do about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    KafkaConnectionError,
    UnknownTopicOrPartitionError,
    for_code,
)

from plait.service.client import OWN_PREFIX, BrokersUnreachable
from plait.service.settings import TopicSettings
from plait.service.topics import create_own

_LAST_RECORDS_S = 5.0
_COORDINATOR_S = 10.0


@dataclass(frozen=True, slots=True)
class TopicReport:
    """One topic. `lag` is the number of requests that the group has not finished; `age` is the number of
    seconds since the newest record; both None where there is nothing to say."""

    name: str
    kind: str
    partitions: int
    records: int
    lag: int | None = None
    age: float | None = None


@asynccontextmanager
async def admin(kafka: Mapping[str, Any]) -> AsyncIterator[AIOKafkaAdminClient]:
    """An admin client. `kafka` holds the arguments of any aiokafka client. Raises BrokersUnreachable."""
    client = AIOKafkaAdminClient(**kafka)
    try:
        try:
            await client.start()
        except KafkaConnectionError as error:
            servers = kafka["bootstrap_servers"]
            raise BrokersUnreachable(f"no Kafka broker answers at {servers}") from error
        yield client
    finally:
        await client.close()


def kind_of(topic: str, settings: TopicSettings) -> str | None:
    """What a topic is for; None when it is none of plait's."""
    own = {settings.control: "control", settings.dlq: "dead letters"}
    own |= {lane.topic: "requests" for lane in settings.all_lanes()}
    if topic in own:
        return own[topic]
    if topic.startswith(settings.responses_prefix):
        return "response"
    return "client" if topic.startswith(OWN_PREFIX) else None


async def report(kafka: Mapping[str, Any], settings: TopicSettings, group_id: str) -> list[TopicReport]:
    """All of plait's topics, the fixed ones first."""
    async with admin(kafka) as client:
        found = {
            topic["topic"]: [TopicPartition(topic["topic"], p["partition"]) for p in topic["partitions"]]
            for topic in await client.describe_topics()
            if kind_of(topic["topic"], settings)
        }
        committed: dict[TopicPartition, Any] = {}
        for lane in settings.all_lanes():
            committed |= await _committed(client, settings.group_of(lane.topic, group_id))
    everything = [partition for partitions in found.values() for partition in partitions]
    async with AIOKafkaConsumer(**kafka, auto_offset_reset="earliest") as consumer:
        # aiokafka cannot stop a consumer whose tasks have not begun.
        await asyncio.sleep(0)
        begins = await consumer.beginning_offsets(everything) if everything else {}
        ends = await consumer.end_offsets(everything) if everything else {}
        newest = await _newest(consumer, [p for p in everything if ends[p] > begins[p]], ends)
    now = time.time()
    rows = []
    for topic, partitions in found.items():
        times = [newest[p] for p in partitions if p in newest]
        rows.append(
            TopicReport(
                name=topic,
                kind=kind_of(topic, settings) or "",
                partitions=len(partitions),
                records=sum(ends[p] - begins[p] for p in partitions),
                lag=_lag(partitions, begins, ends, committed)
                if kind_of(topic, settings) == "requests"
                else None,
                age=max(0.0, now - max(times) / 1000) if times else None,
            )
        )
    order = ("requests", "control", "dead letters", "client", "response")
    return sorted(rows, key=lambda row: (order.index(row.kind), row.name))


async def _committed(client: AIOKafkaAdminClient, group_id: str) -> dict[TopicPartition, Any]:
    """A cluster that has just been made needs a moment to make the topic of its groups."""
    deadline = time.monotonic() + _COORDINATOR_S
    while True:
        try:
            return await client.list_consumer_group_offsets(group_id)  # type: ignore[no-any-return]
        except GroupCoordinatorNotAvailableError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


async def create_fixed(kafka: Mapping[str, Any], settings: TopicSettings) -> list[str]:
    """Make the requests, control and dead-letter topics that are missing; returns those made."""
    async with admin(kafka) as client:
        return await create_own(client, settings)


async def remove_expired(
    kafka: Mapping[str, Any], settings: TopicSettings, rows: list[TopicReport], older_than: float
) -> list[str]:
    """Delete response topics whose newest record is older than `older_than` seconds; returns their names.

    An empty topic has no age and stays: its stream may be about to begin.
    """
    old = [r.name for r in rows if r.kind in ("response", "client") and (r.age or 0) > older_than]
    if old:
        async with admin(kafka) as client:
            answer = await client.delete_topics(old)
            for name, code in answer.topic_error_codes:
                # A worker removes them too.
                if code not in (0, UnknownTopicOrPartitionError.errno):
                    raise for_code(code)(f"topic {name} could not be deleted")
    return old


async def _newest(
    consumer: AIOKafkaConsumer, partitions: list[TopicPartition], ends: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """Time of the newest record of each partition that is not empty, in ms since the epoch."""
    newest: dict[TopicPartition, int] = {}
    if not partitions:
        return newest
    consumer.assign(partitions)
    for partition in partitions:
        consumer.seek(partition, ends[partition] - 1)
    # The last offset can be a transaction's marker, which no consumer sees: there is a limit to waiting.
    deadline = time.monotonic() + _LAST_RECORDS_S
    while len(newest) < len(partitions) and time.monotonic() < deadline:
        for partition, records in (await consumer.getmany(timeout_ms=200)).items():
            newest[partition] = records[-1].timestamp
    return newest


def _lag(
    partitions: list[TopicPartition],
    begins: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    committed: Mapping[TopicPartition, Any],
) -> int:
    done = {p: max(begins[p], committed[p].offset if p in committed else 0) for p in partitions}
    return sum(max(0, ends[p] - done[p]) for p in partitions)
