"""Those that wait: one heap a lane, and a heap by age."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from math import inf

from plait.engine.policies.base import Policy
from plait.engine.sequence import Sequence, Status

Entry = tuple[float, int, int, Sequence]
WAITING = Status.WAITING  # an enum's member is slow to find
MOVES = 16
"""Keys made anew at one moment at most: when thousands expire at once, an iteration is not held up by it."""
FIRST = ("first",)
"""The lane of those that come before all others, whatever the policy: in order of arrival."""


def _waits(entry: Entry) -> bool:
    return entry[3].ticket == entry[2] and entry[3].status is WAITING


class Heap:
    """Sequences by (key, number); what left the queue is dropped when met, or when most of it is stale."""

    __slots__ = ("entries", "size")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.size = 0

    def push(self, key: float, seq: Sequence) -> None:
        heapq.heappush(self.entries, (key, seq.number, seq.ticket, seq))
        self.size += 1

    def first(self) -> Sequence | None:
        entries = self.entries
        while entries:
            _, _, ticket, seq = entries[0]
            if seq.ticket == ticket and seq.status is WAITING:
                return seq
            heapq.heappop(entries)
        return None

    def replace(self, key: float, seq: Sequence) -> None:
        """The first one's place changes."""
        heapq.heapreplace(self.entries, (key, seq.number, seq.ticket, seq))

    def leave(self) -> None:
        """One of them does not wait any more."""
        self.size -= 1
        if len(self.entries) > 64 and len(self.entries) > 2 * self.size:
            self.entries = [entry for entry in self.entries if _waits(entry)]
            heapq.heapify(self.entries)


class WaitingQueue:
    """Push and removal in O(log n), a look in O(lanes that hold somebody).

    Sequences of one lane keep their order while they wait; how lanes compare may change with every look. A key that
    has expired is made anew when its sequence has become the first of its lane: until then it matters to nobody. A
    lane for which the moment's share of that is used up is passed over, unless there is no other.
    One that was preempted keeps its key, so that it comes back before those of its kind that never ran (vllm#5578).
    Long sequences wait in lanes of their own, so that a look can pass them over.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.lanes: dict[tuple[object, ...], Heap] = {}
        self._ages = Heap()
        self._tickets = count()
        self._moves, self._moved_at = 0, 0.0

    def push(self, seq: Sequence, now: float, first: bool = False) -> None:
        """Its status is WAITING. With `first` it comes before all that were pushed without."""
        seq.ticket = next(self._tickets)
        self.policy.queued(seq)
        if seq.timeline.first_token is not None:
            seq.expires = inf  # it began in time, or did not; waiting again changes nothing of that
        seq.lane = FIRST if first else (seq.long, self.policy.lane(seq))
        self._place(seq, now)
        self._ages.push(seq.timeline.arrived, seq)

    def _place(self, seq: Sequence, now: float) -> None:
        if now >= seq.expires:
            seq.key, seq.expires = self.policy.expired(seq), inf
        elif not seq.preemptions:
            seq.key, seq.expires = self.policy.key(seq, now)
        if seq.lane not in self.lanes:
            self.lanes[seq.lane] = Heap()
        self.lanes[seq.lane].push(seq.timeline.arrived if seq.lane is FIRST else seq.key, seq)

    def oldest(self) -> Sequence | None:
        return self._ages.first()

    def privileged(self) -> Sequence | None:
        """The oldest of those that were pushed with `first`."""
        return self.lanes[FIRST].first() if FIRST in self.lanes else None

    def first(self, now: float, with_long: bool = True) -> Sequence | None:
        """The policy's choice among those that wait in its lanes."""
        if now != self._moved_at:
            self._moves, self._moved_at = 0, now
        best, least = None, (False, 0.0, 0)
        for lane, heap in self.lanes.items():
            if lane is FIRST or (lane[0] and not with_long):
                continue
            while (seq := heap.first()) is not None and now >= seq.expires and self._moves < MOVES:
                seq.key, seq.expires = self.policy.expired(seq), inf
                heap.replace(seq.key, seq)
                self._moves += 1
            if seq is not None:
                place = (now >= seq.expires, self.policy.rank(seq), seq.number)
                if best is None or place < least:
                    best, least = seq, place
        return best

    def remove(self, seq: Sequence) -> None:
        """Its status is not WAITING any more."""
        self.policy.unqueued(seq)
        heap = self.lanes[seq.lane]
        heap.leave()
        if not heap.size:
            del self.lanes[seq.lane]
        self._ages.leave()

    def sample(self, most: int) -> tuple[list[Sequence], int]:
        """About `most` of them, spread over all, and how many each stands for."""
        entries = self._ages.entries
        step = max(1, len(entries) // most)
        return [entry[3] for entry in entries[::step] if _waits(entry)], step

    def __len__(self) -> int:
        return self._ages.size

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[3] for entry in self._ages.entries if _waits(entry))
