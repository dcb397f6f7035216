"""Decides at every iteration which sequences compute how many tokens.

There is no prefill or decode phase: a sequence has tokens known and tokens computed, and an iteration gives
each chosen one some of the difference under one token budget (Orca's iteration-level scheduling, OSDI 2022;
chunked prefill as in Sarathi-Serve, OSDI 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any

from plait.engine.api import FinishReason
from plait.engine.kv_cache import KvCache
from plait.engine.policy import Policy
from plait.engine.sequence import Chunk, Sequence, Status
from plait.engine.waiting import WaitingQueue


class Scheduler:
    """Waiting and running sequences.

    The running sequence of the first rank always gets what it needs, at the cost of the last ones, and no sequence
    is longer than the pool: so every iteration makes progress. One that was preempted `max_preemptions` times comes
    before all that were not, and makes room only for those that got there before it: so preemptions are bounded.
    """

    def __init__(
        self,
        kv: KvCache,
        policy: Policy,
        *,
        max_running: int,
        token_budget: int,
        max_preemptions: int,
        watermark: float,
        clock: Callable[[], float],
    ):
        self.kv = kv
        self.policy = policy
        # More than one token for each, or decodes would keep a prompt from ever being prefilled.
        self.token_budget = max(token_budget, max_running + kv.blocks.block_size)
        self.max_preemptions = max_preemptions
        self.reserve = max(1, math.ceil(watermark * kv.blocks.num_blocks))
        self.clock = clock
        self.waiting = WaitingQueue(self._rank)
        self.running: list[Sequence] = []
        self.seats = list(range(max_running - 1, -1, -1))
        self.preemptions = 0
        self.admitted: list[Sequence] = []
        self._numbers, self._protections = count(), count()

    def add(self, seq: Sequence) -> None:
        seq.number = next(self._numbers)
        self.waiting.push(seq)

    def _rank(self, seq: Sequence) -> tuple[Any, ...]:
        """No two are equal, or neither of two could make the other go."""
        if seq.protected is not None:
            return (0, seq.protected)
        return (1, *self.policy.key(seq), seq.number)

    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def schedule(self) -> list[Chunk]:
        """The next iteration's chunks: single tokens first, then longer ones. Empty only when there is no work."""
        self.running.sort(key=self._rank)
        self._chosen: list[Chunk] = []
        self._arriving: list[Chunk] = []
        self._budget = self.token_budget
        self.admitted = []
        preempted_before = self.preemptions
        # Decodes first: one token each always fits, and their time per token is what users watch.
        for seq in sorted(self.running, key=lambda s: s.remaining > 1):
            if seq.status is Status.RUNNING and self._budget and self._grow(seq):
                self._choose(seq)
        if self.preemptions == preempted_before:
            self._admit()
        # When all are still being copied in, the iteration waits for them.
        return sorted(self._chosen or self._arriving, key=lambda c: c.count > 1)

    def _choose(self, seq: Sequence) -> None:
        chunk = Chunk(seq, min(seq.remaining, self._budget))
        (self._chosen if self.kv.ready(seq) else self._arriving).append(chunk)
        self._budget -= chunk.count

    def _grow(self, seq: Sequence) -> bool:
        """Blocks for all tokens of a running sequence, taken from the last ones if need be; else it waits.

        A victim has no chunk yet: decodes go by rank, and a sequence with more to compute got its blocks on admission.
        """
        while not self.kv.grow(seq):
            victim = self.running[-1]
            if victim is seq:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to waiting."""
        self.preemptions += 1
        now = self.clock()
        if self.kv.evict(seq):
            seq.timeline.swaps.append(now)
        self._leave(seq)
        seq.preemptions += 1
        if seq.preemptions >= self.max_preemptions and seq.protected is None:
            seq.protected = next(self._protections)
        seq.timeline.preemptions.append(now)
        seq.status = Status.WAITING
        self.waiting.push(seq)

    def _admit(self) -> None:
        while self._budget and self.seats and (seq := self.waiting.peek()):
            # The reserve keeps a sequence out that would be preempted, or preempt, as soon as it is in.
            if not self.kv.admit(seq, self.reserve if self.running else 0):
                break
            self.waiting.pop()
            seq.seat = self.seats.pop()
            seq.status = Status.RUNNING
            if seq.timeline.scheduled is None:
                seq.timeline.scheduled = self.clock()
            self.running.append(seq)
            self.admitted.append(seq)
            self._choose(seq)

    def advance(self, chunks: list[Chunk]) -> None:
        """The chunks were computed: their KV is in the pool."""
        self.kv.written(chunks)

    def finish(self, seq: Sequence, reason: FinishReason, message: str | None = None) -> None:
        """End a sequence in whatever state it is; ending one twice changes nothing."""
        if seq.status is Status.FINISHED:
            return
        was, seq.status = seq.status, Status.FINISHED
        # An error may come from what is in the pool: nobody else is to read it.
        self.kv.release(seq, sound=reason != "error")
        if was is Status.RUNNING:
            self._leave(seq)
        else:
            self.waiting.forget(seq)
        seq.reason, seq.message = reason, message
        seq.timeline.finished = self.clock()

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.seats.append(seq.seat)
        seq.seat = -1

    def check(self) -> None:
        """Raise AssertionError when the pool's book-keeping is off."""
        self.kv.check(self.running)
