"""What is in flight: one lease per record that was read and is not yet answered."""

from __future__ import annotations

from collections.abc import Callable

from aiokafka import TopicPartition

from plait.service.offsets import OffsetTracker


class Partition:
    """One assignment of a partition to this worker: a later assignment of the same one is another object."""

    def __init__(self, topic_partition: TopicPartition, epoch: int) -> None:
        self.topic_partition = topic_partition
        self.epoch = epoch
        self.tracker = OffsetTracker()
        self.committed: int | None = None
        self.leases: dict[int, Lease] = {}


class Lease:
    """The right and the duty to answer one record. It ends with `finish` or `abandon`, the first counts."""

    def __init__(self, partition: Partition, offset: int, size: int, on_end: Callable[[Lease], None]) -> None:
        self.partition = partition
        self.offset = offset
        self.size = size
        self.on_lost: Callable[[], None] | None = None
        self._on_end: Callable[[Lease], None] | None = on_end
        partition.leases[offset] = self

    @property
    def epoch(self) -> int:
        """The group's generation under which the record is ours now."""
        return self.partition.epoch

    def finish(self) -> None:
        """The record is answered, durably: its offset may be committed."""
        if self._on_end is not None:
            self.partition.tracker.finish(self.offset)
        self._end()

    def abandon(self) -> None:
        """Somebody else answers: the offset stays open."""
        self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            del self.partition.leases[self.offset]
            on_end(self)
