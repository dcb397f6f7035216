"""What the last owners of partitions left, read when they become ours."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from plait.service import commit_metadata
from plait.service.commit_metadata import Progress
from plait.service.kafka import say

log = logging.getLogger(__name__)

RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Left:
    """The committed offset and what was beside it, and the first and the next offset of the partition."""

    committed: int | None
    progress: Progress | None
    begin: int
    end: int


async def read(consumer: Any, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Left]:
    """Ask the group's coordinator and the partitions' leaders until they answer.

    aiokafka's own `committed()` gives the offset alone.
    """
    while True:
        try:
            committed = await consumer._coordinator.fetch_committed_offsets(list(partitions))
            begins = await consumer.beginning_offsets(partitions)
            ends = await consumer.end_offsets(partitions)
            break
        except (KafkaError, OSError) as error:
            log.warning("reading the committed offsets, trying again: %s", say(error))
            await asyncio.sleep(RETRY_S)
    return {tp: _understand(tp, committed.get(tp), begins[tp], ends[tp]) for tp in partitions}


def _understand(tp: TopicPartition, committed: Any, begin: int, end: int) -> Left:
    if committed is None:
        return Left(None, None, begin, end)
    progress = commit_metadata.decode(committed.offset, committed.metadata or "")
    if progress is None:
        log.warning(
            "%s[%d]@%d was committed without metadata that plait understands: records up to %d are looked up in their"
            " response topics",
            *(tp.topic, tp.partition, committed.offset, end),
        )
    return Left(committed.offset, progress, begin, end)
