"""The waiting queue: a heap."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from plait.engine.sequence import Sequence, Status


class WaitingQueue:
    """The smallest rank first: push, peek and pop in O(log n). A rank must not change while its sequence waits.

    Removal is lazy: a sequence that is no longer waiting is dropped when met.
    """

    def __init__(self, rank: Callable[[Sequence], tuple[Any, ...]]):
        self._rank = rank
        self._heap: list[tuple[tuple[Any, ...], int, Sequence]] = []
        self._ticket = count()
        self._size = 0

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (self._rank(seq), next(self._ticket), seq))
        self._size += 1

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][2].status is not Status.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        seq = self.peek()
        if seq is None:
            raise IndexError("the waiting queue is empty")
        heapq.heappop(self._heap)
        self._size -= 1
        return seq

    def forget(self, seq: Sequence) -> None:
        """Count a sequence out whose status was changed from waiting. Compacts when most entries are stale."""
        self._size -= 1
        if len(self._heap) > 64 and len(self._heap) > 2 * self._size:
            self._heap = [entry for entry in self._heap if entry[2].status is Status.WAITING]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for entry in self._heap if entry[2].status is Status.WAITING)
