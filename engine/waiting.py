"""The waiting queue: a heap by the policy's key."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Any

from plait.engine.policy import Policy
from plait.engine.sequence import Sequence, Status


class WaitingQueue:
    """Push, peek and pop in O(log n). Removal is lazy: a sequence that is no longer waiting is dropped when met."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self._heap: list[tuple[tuple[Any, ...], int, Sequence]] = []
        self._ticket = count()
        self._size = 0

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (self._policy.key(seq), next(self._ticket), seq))
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
