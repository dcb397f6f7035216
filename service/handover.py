"""Takes partitions over: reads what their last owners left, and with transactions fences them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from plait.service import commit_metadata
from plait.service.commit_metadata import Progress
from plait.service.kafka import say
from plait.service.leases import Partition
from plait.service.membership import Membership
from plait.service.settings import Settings
from plait.service.transactions import Channel

log = logging.getLogger(__name__)

RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Left:
    """The committed offset and what was beside it, and the first and the next offset of the partition."""

    committed: int | None
    progress: Progress | None
    begin: int
    end: int


async def read(consumer: Any, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Left]:
    """Ask the group's coordinator, whose metadata aiokafka's own `committed()` leaves out, and the partitions'
    leaders. Raises KafkaError."""
    committed = await consumer._coordinator.fetch_committed_offsets(list(partitions))
    begins = await consumer.beginning_offsets(partitions)
    ends = await consumer.end_offsets(partitions)
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


class Takeovers:
    """Opens partitions that have become ours, in the background, and tries until they are open or went again.

    `owned` gives the partitions that are ours now; `on_open` is called for each that was opened. `give_up` puts a
    fresh partition into the place of one whose transaction is lost, which is then taken over anew.
    """

    def __init__(
        self,
        settings: Settings,
        membership: Membership,
        owned: Callable[[], Mapping[TopicPartition, Partition]],
        on_open: Callable[[Partition], None],
        give_up: Callable[[Partition, Partition], None],
    ) -> None:
        self._settings = settings
        self._membership = membership
        self._owned = owned
        self._on_open = on_open
        self._give_up = give_up
        self._transactional = settings.worker.delivery == "transactional"
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, consumer: Any, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            partition.is_opening = True
        task = asyncio.create_task(self._take_over(consumer, partitions), name="plait-take-over")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _take_over(self, consumer: Any, partitions: Sequence[Partition]) -> None:
        while closed := [p for p in partitions if self._is_ours(p) and not p.is_open]:
            try:
                await self._open(consumer, closed)
            except Exception as error:
                log.warning("taking over partitions, trying again: %s", say(error))
                await asyncio.sleep(RETRY_S)

    def _is_ours(self, partition: Partition) -> bool:
        return self._owned().get(partition.topic_partition) is partition

    async def _open(self, consumer: Any, partitions: Sequence[Partition]) -> None:
        if self._transactional:
            await asyncio.gather(*[self._fence(consumer, p) for p in partitions if p.channel is None])
        left = await read(consumer, [partition.topic_partition for partition in partitions])
        for partition in partitions:
            if not self._is_ours(partition):
                continue
            found = left[partition.topic_partition]
            if self._transactional:
                # What aiokafka took for committed may have been from before the last owner was fenced.
                known = found.committed is not None and found.begin <= found.committed <= found.end
                offset = (found.committed if known else None) or found.begin
                consumer.seek(partition.topic_partition, offset)
            partition.restore(found.committed, found.progress, found.end)
            self._on_open(partition)

    async def _fence(self, consumer: Any, partition: Partition) -> None:
        """Open the partition's transactions: from now on its last owner can publish nothing that counts."""
        group = consumer._coordinator.group_id
        lost = partial(self.reclaim, consumer, partition)
        channel = Channel(self._settings, self._membership, group, partition.topic_partition, lost)
        try:
            await channel.open()
        except (KafkaError, OSError):
            await channel.close()
            raise
        partition.channel = channel

    def reclaim(self, consumer: Any, partition: Partition) -> None:
        """Its transaction is lost: take the partition over anew, if it is still ours."""
        if not self._is_ours(partition):
            return
        fresh = Partition(partition.topic_partition, partition.epoch)
        fresh.refused = partition.refused
        fresh.inherited = partition.inherited  # nobody has died of what was being run
        for key, reason in (partition.channel.refused if partition.channel else {}).items():
            fresh.refused[key] = fresh.refused.get(key, (0, ""))[0] + 1, reason
        self._give_up(partition, fresh)
        self.begin(consumer, [fresh])
