"""Which offset of a partition may be committed when requests finish out of order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class OffsetTracker:
    """Delivered and finished offsets of one partition.

    Only the contiguous prefix of *delivered* offsets counts, so that gaps left by compaction or by
    transaction markers do not hold it up. `start` is the committed offset and `finished` what an earlier owner
    finished above it: these are recognised when they are delivered again.
    """

    def __init__(self, start: int | None = None, finished: Iterable[int] = ()) -> None:
        self._open: deque[int] = deque()  # delivered and not yet below the prefix, ascending
        self._finished: set[int] = set()  # finished ones among them
        self._before = deque(sorted(finished))  # finished by an earlier owner, not delivered yet
        self._last = -1
        self._position = start

    def deliver(self, offset: int) -> bool:
        """Note a delivery; False when this offset, or a later one, was delivered before, or is finished."""
        if offset <= self._last:
            return False
        self._last = offset
        if self._position is None:
            self._position = offset
        elif offset < self._position:
            return False
        self._open.append(offset)
        while self._before and self._before[0] < offset:
            self._before.popleft()  # it is not in the log any more
        if self._before and self._before[0] == offset:
            self._before.popleft()
            self.finish(offset)
            return False
        return True

    def finish(self, offset: int) -> None:
        """The request at this delivered offset needs nothing more."""
        if not self._open or offset < self._open[0]:
            return
        self._finished.add(offset)
        while self._open and self._open[0] in self._finished:
            done = self._open.popleft()
            self._finished.remove(done)
            self._position = done + 1

    @property
    def position(self) -> int | None:
        """The offset to commit: everything delivered below it is finished. None when nothing is known."""
        return self._position

    @property
    def next(self) -> int | None:
        """The offset after the last delivered one. None before the first."""
        return None if self._last < 0 else self._last + 1

    @property
    def unfinished(self) -> int:
        """Deliveries that are not finished."""
        return len(self._open) - len(self._finished)

    @property
    def window(self) -> int:
        """Offsets from the first unfinished one to the last delivered: what the tracker has to remember."""
        return len(self._open)

    def finished_above(self) -> list[int]:
        """Offsets that are finished although an earlier one is not, ascending."""
        return sorted([*self._finished, *self._before])
