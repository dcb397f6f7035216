"""What is in flight: one lease per record that was read and is not yet answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiokafka import TopicPartition

from plait.service.commit_metadata import Mark, Progress
from plait.service.offsets import OffsetTracker

if TYPE_CHECKING:
    from plait.service.transactions import Channel

# Offsets that a commit reserves beyond what was read: none is started before a commit says that it may have been.
RESERVE = 1000


class Partition:
    """One assignment of a partition to this worker: a later assignment of the same one is another object.

    It is closed until `restore` says what its last owner left. `reach` is what the last commit reserved.
    """

    def __init__(self, topic_partition: TopicPartition, epoch: int) -> None:
        self.topic_partition = topic_partition
        self.epoch = epoch
        self.tracker = OffsetTracker()
        self.committed: tuple[int, str] | None = None
        self.leases: dict[int, Lease] = {}
        self.waiting: deque[Any] = deque()  # records that may not be started yet
        self.is_open = self.is_opening = False
        self.channel: Channel | None = None  # with transactional delivery
        self.refused: dict[
            bytes | None, tuple[int, str]
        ] = {}  # by request: events refused, how often and why
        self.reach = 0
        # Attempts that ended with an earlier owner; set before `restore` when this worker was the owner all along.
        self.inherited: Mapping[int, Mark] | None = None
        self._maybe_started = 0
        self._marks: dict[int, Mark] = {}  # of records that were not delivered yet

    def restore(self, committed: int | None, progress: Progress | None, end: int) -> None:
        """Begin where the last owner was. `end` is the partition's end now: nobody can have started what came
        later. Without `progress` all that exists may have been started."""
        if committed is not None and committed > end:
            committed = progress = None  # another log than the one that was committed for
        if progress is not None:
            self.tracker = OffsetTracker(committed, progress.finished)
            self.reach = progress.reach
        else:
            self.tracker = OffsetTracker(committed)
        if self.inherited is None or progress is None:
            self.inherited = progress.marks if progress is not None else {}
        self._marks = dict(self.inherited)
        self._maybe_started = end if progress is None else min(end, progress.reach)
        self.is_open = True

    def maybe_started(self, offset: int) -> bool:
        """Whether an earlier owner may have begun to answer this record."""
        return offset < self._maybe_started

    def take_mark(self, offset: int) -> Mark | None:
        """What was noted of attempts at this record, which is delivered now."""
        return self._marks.pop(offset, None)

    def keep_mark(self, offset: int, mark: Mark) -> None:
        """The record is left to the next owner."""
        self._marks[offset] = mark

    def progress(self, *, clean: bool) -> Progress:
        """What the next owner must know. `clean`: this one leaves in order, so that no attempt has failed."""
        seen = self.tracker.next or self.tracker.position or 0
        if self.waiting:
            seen = max(seen, self.waiting[0].offset)  # there can be a gap before it
        reach = self.reach if self.reach - seen >= RESERVE // 2 else seen + RESERVE
        first = self.tracker.position or 0
        marks = {offset: mark for offset, mark in self._marks.items() if offset >= first} | {
            offset: mark for offset, lease in self.leases.items() if (mark := lease.mark(clean=clean))
        }
        epoch = max([self.epoch, *(mark.epoch for mark in marks.values())])
        return Progress(reach, epoch, self.tracker.finished_above(), marks)


class Lease:
    """The right and the duty to answer one record. It ends with `finish` or `abandon`, the first counts.

    `before` is what was noted of earlier attempts. While `at_risk` says so, the death of this worker would be
    one more. `recorded` returns once a commit has said that this attempt has begun.
    """

    def __init__(
        self,
        partition: Partition,
        offset: int,
        size: int,
        on_end: Callable[[Lease], None],
        recorded: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.partition = partition
        self.offset = offset
        self.size = size
        self.on_lost: Callable[[], None] | None = None
        self.maybe_started = partition.maybe_started(offset)
        self.before = partition.take_mark(offset)
        self.at_risk: Callable[[], bool] | None = None
        self.attempt_epoch = (
            0  # of the events of this attempt; a static member can come back in its generation
        )
        self._recorded = recorded
        self._on_end: Callable[[Lease], None] | None = on_end
        partition.leases[offset] = self

    @property
    def epoch(self) -> int:
        """The group's generation under which the record is ours now."""
        return self.partition.epoch

    async def recorded(self) -> None:
        if self._recorded is not None:
            await self._recorded()

    def mark(self, *, clean: bool) -> Mark | None:
        """What to note of attempts at this record."""
        if clean or self.at_risk is None or not self.at_risk():
            return self.before
        attempts = 1 + (self.before.attempts if self.before else 0)
        return Mark(attempts, max(self.epoch, self.attempt_epoch))

    def finish(self) -> None:
        """The record is answered, durably: its offset may be committed."""
        if self._on_end is not None:
            self.partition.tracker.finish(self.offset)
        self._end()

    def abandon(self) -> None:
        """Somebody else answers: the offset stays open."""
        if self._on_end is not None and self.before is not None:
            self.partition.keep_mark(self.offset, self.before)
        self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            del self.partition.leases[self.offset]
            on_end(self)
