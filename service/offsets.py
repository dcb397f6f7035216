"""Which offset of a partition may be committed when requests finish out of order."""

from __future__ import annotations

from collections import deque


class OffsetTracker:
    """Delivered and finished offsets of one partition.

    Only the contiguous prefix of *delivered* offsets counts, so that gaps left by compaction or by
    transaction markers do not hold it up.
    """

    def __init__(self) -> None:
        self._open: deque[int] = deque()  # delivered and not yet below the prefix, ascending
        self._finished: set[int] = set()  # finished ones among them
        self._last = -1
        self._position: int | None = None

    def deliver(self, offset: int) -> bool:
        """Note a delivery; False when this offset, or a later one, was delivered before."""
        if offset <= self._last:
            return False
        self._last = offset
        self._open.append(offset)
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
        """The offset to commit: everything delivered below it is finished. None before the first."""
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
        return sorted(self._finished)
