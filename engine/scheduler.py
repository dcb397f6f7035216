"""Decides at every iteration which sequences compute how many tokens.

There is no prefill or decode phase: a sequence has tokens known and tokens computed, and an iteration gives
each chosen one some of the difference under one token budget (Orca's iteration-level scheduling, OSDI 2022;
chunked prefill as in Sarathi-Serve, OSDI 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import count
from math import inf

from plait.engine.api import FinishReason
from plait.engine.budget import Pace
from plait.engine.config import EngineConfig
from plait.engine.gather import Gate
from plait.engine.kv_cache import KvCache
from plait.engine.lengths import Lengths
from plait.engine.outlook import Outlook
from plait.engine.policies import make_policy
from plait.engine.sequence import Chunk, Sequence, Status
from plait.engine.time_model import Load, TimeModel
from plait.engine.waiting import WaitingQueue

Rank = tuple[int, float, int]


class Scheduler:
    """Waiting and running sequences.

    Sequences are in two classes. The second is in the policy's order. The first comes before it, whatever the policy,
    in order of arrival: those that arrived `max_wait_seconds` ago or were preempted `max_preemptions` times. The
    first of all always gets what it needs, at the cost of the last ones, and no sequence is longer than the pool. So
    every iteration makes progress, preemptions are bounded, and nobody starves: once a sequence is in the first
    class it has ended after as many iterations as it and all older ones that have not ended take one after another
    (one for each `block_size` tokens of a prompt and one for each token of an answer). With `batching` other than
    continuous, those that the batch in progress still takes are added.
    """

    def __init__(self, kv: KvCache, config: EngineConfig, *, clock: Callable[[], float], device: str = "cpu"):
        self.kv = kv
        self.config = config
        self.clock = clock
        self.block_size = kv.blocks.block_size
        # More than one token for each, or decodes would keep a prompt from ever being prefilled.
        self.token_budget = max(config.budget(device), config.max_running + self.block_size)
        self.times = TimeModel(device)
        self.lengths = Lengths()
        self.outlook = Outlook(self.times, self.lengths, self.token_budget)
        self.policy = make_policy(config, self.outlook)
        self.pace = Pace(self.times, max(self.block_size, self.token_budget // 8))
        self.gate = Gate(config)
        self.reserve = max(1, math.ceil(config.watermark * kv.blocks.num_blocks))
        self.high_reserve = max(self.reserve, math.ceil(config.high_watermark * kv.blocks.num_blocks))
        self.max_long = max(1, int(config.long_share * config.max_running))
        self.waiting = WaitingQueue(self.policy)
        self.running: list[Sequence] = []
        self.seats = list(range(config.max_running - 1, -1, -1))
        self.preemptions = 0
        self.admitted: list[Sequence] = []
        self.load, self.learns = Load(), True
        self._tight = False
        self._long = 0
        self._chosen: dict[Sequence, Chunk] = {}
        self._numbers = count()

    def add(self, seq: Sequence) -> None:
        seq.number = next(self._numbers)
        seq.long = 0 < self.config.long_tokens <= len(seq.tokens) + self.lengths.remaining(seq)
        self.waiting.push(seq, self.clock())

    def rehearse(self, on: bool) -> None:
        """While it is on, nothing is learnt from times and lengths and no batch gathers: for a warm-up."""
        self.learns, self.gate.gathers = not on, not on

    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def pause(self) -> float:
        """Seconds until `schedule` has something to do: above zero while a batch gathers."""
        oldest = self.waiting.oldest()
        if self.running or oldest is None or len(self.waiting) >= self.config.max_running:
            return 0.0
        return max(0.0, self.gate.opens_at(oldest.timeline.arrived) - self.clock())

    def _first_class(self, seq: Sequence, now: float) -> bool:
        return self._protected(seq) or now - seq.timeline.arrived >= self.config.max_wait_seconds

    def _protected(self, seq: Sequence) -> bool:
        return seq.preemptions >= max(1, self.config.max_preemptions)

    def _rank(self, seq: Sequence, now: float) -> Rank:
        """No two are equal, or neither of two could make the other go."""
        if self._first_class(seq, now):
            return (0, seq.timeline.arrived, seq.number)
        return (1, self.policy.rank(seq), seq.number)

    def schedule(self) -> list[Chunk]:
        """The next iteration's chunks: single tokens first, then longer ones. Empty when there is no work, or while
        a batch gathers."""
        now = self.clock()
        self._chosen, self.admitted = {}, []
        self._budget = self.token_budget
        before = self.preemptions
        decoding, prompts = [], []
        for seq in self.running:
            (decoding if len(seq.tokens) - seq.computed == 1 else prompts).append(seq)
        left_out = self.pace.leave_out(decoding, now, lambda seq: self._first_class(seq, now))
        # Decodes first: one token each always fits, and their time per token is what users watch.
        short = self._decode([seq for seq in decoding if seq not in left_out] if left_out else decoding, now)
        if left_out and not self._chosen:
            short = self._decode(left_out, now)
        for seq in left_out:
            if seq not in self._chosen:
                seq.skipped += 1
                self._budget -= 1
        decoding = list(self._chosen)
        decodes = Load(0, len(decoding), sum(seq.computed for seq in decoding))
        # A prompt that has begun goes on in every iteration, by a block at least.
        for seq in prompts:
            if seq.status is Status.RUNNING:
                self._choose(seq, min(seq.remaining, self.block_size))
        self._budget = int(min(self._budget, self.pace.prompt_tokens(decodes)))
        self._fill(prompts, now, join=self.preemptions == before and not short)
        return self._settle()

    def _decode(self, seqs: Iterable[Sequence], now: float) -> bool:
        """A token for each. Says whether memory was short for one."""
        short, chosen, size = False, self._chosen, self.block_size
        running = Status.RUNNING  # an enum's member is slow to find
        for seq in seqs:
            if seq.status is not running:
                continue
            # Most need no block now, and are spared the calls.
            if len(seq.tokens) <= len(seq.blocks) * size or self._grow(seq, now):
                chosen[seq] = Chunk(seq, 1)
                seq.skipped = 0
            else:
                short = True
            self._budget -= 1  # also where it gets none: what begins now goes on beside it later
        return short

    def _settle(self) -> list[Chunk]:
        ready = [c for c in self._chosen.values() if c.seq.arriving is None or self.kv.ready(c.seq)]
        # When all are still being copied in, the iteration waits for them.
        ready = ready or list(self._chosen.values())
        chunks = [c for c in ready if c.count == 1] + [c for c in ready if c.count > 1]
        self.load = Load.of(chunks)
        self.outlook.decodes = self.load._replace(prefill=0, pairs=0.0)
        return chunks

    def _choose(self, seq: Sequence, count: int) -> None:
        self._chosen[seq] = Chunk(seq, count)
        self._budget -= count

    def _widen(self, seq: Sequence, limit: float = inf) -> None:
        """More of the prompt, as far as the budget goes."""
        chunk = self._chosen[seq]
        more = max(0, min(int(min(seq.remaining, limit)) - chunk.count, self._budget))
        chunk.count += more
        self._budget -= more

    def _fill(self, prompts: list[Sequence], now: float, join: bool) -> None:
        """Give what is left of the budget to prompts in order of rank, those that run and those that wait."""
        ranked = sorted(prompts, key=lambda seq: self._rank(seq, now), reverse=True)
        long_limit = self.config.long_share * self.token_budget
        if len(self.waiting):
            self.gate.open(len(self.running), len(self.waiting), self.waiting.oldest().timeline.arrived, now)
        head = self._next(now, join)
        while (ranked or head) and (self._budget > 0 or (head and self._first_class(head, now))):
            if head and not (ranked and self._rank(ranked[-1], now) < self._rank(head, now)):
                head = self._next(now, join) if self._join(head, now) else None
            elif (seq := ranked.pop()) in self._chosen:
                self._widen(seq, long_limit if seq.long else inf)
        for seq in [*prompts, *self.admitted]:
            if seq.long and seq in self._chosen:
                self._widen(seq)

    def _next(self, now: float, join: bool) -> Sequence | None:
        """The first of those that wait, if one may join now; without `join`, only of the first class."""
        if self.gate.places < 1:
            return None
        oldest, privileged = self.waiting.oldest(), self.waiting.privileged()
        if oldest and now - oldest.timeline.arrived >= self.config.max_wait_seconds:
            return oldest
        if privileged or not join:
            return privileged
        return self.waiting.first(now, with_long=self._long < self.max_long)

    def _join(self, seq: Sequence, now: float) -> bool:
        """Seat and memory for one that waits, at the cost of less urgent ones that run; False when there is none."""
        first = min(seq.remaining, self.block_size)
        preempted_now = seq.timeline.preemptions and seq.timeline.preemptions[-1] >= now
        urgent = self._first_class(seq, now)
        if preempted_now or (self._budget < first and not urgent):
            return False
        # The reserve keeps a sequence out that would be preempted, or preempt, as soon as it is in.
        reserve = 0 if urgent or not self.running else self.high_reserve if self._tight else self.reserve
        fits = self.seats and self._budget >= first and self.kv.admit(seq, reserve)
        if not fits:
            made = self._make_room(seq, reserve, now)
            if not made or not self.kv.admit(seq, reserve if self.running else 0):
                self.gate.close()
                return False
        seq.status = Status.RUNNING
        self.waiting.remove(seq)
        self.policy.admitted(seq)
        self.gate.joined()
        seq.seat = self.seats.pop()
        self._long += seq.long
        if seq.timeline.scheduled is None:
            seq.timeline.scheduled = now
        self.running.append(seq)
        self.admitted.append(seq)
        # What the prefix cache had for it counts as computed by now.
        self._choose(seq, min(seq.remaining, self.block_size))
        self._widen(seq, self.config.long_share * self.token_budget if seq.long else inf)
        return True

    def _make_room(self, seq: Sequence, reserve: int, now: float) -> bool:
        """Preempt those that yield to a sequence, last ones first, if that gives it a seat, memory and budget."""
        urgent, rank, yields = self._first_class(seq, now), self._rank(seq, now), self.policy.yields
        victims = [v for v in self.running if (urgent or yields(v, seq, now)) and self._rank(v, now) > rank]
        if not victims:
            return False
        victims.sort(key=lambda v: self._rank(v, now))
        missing = self.kv.shortage(seq, reserve)
        lacking = min(seq.remaining, self.block_size) - self._budget
        chosen: list[Sequence] = []
        while victims and (missing > 0 or lacking > 0 or not (self.seats or chosen)):
            victim = victims.pop()
            chosen.append(victim)
            missing -= self.kv.gain(victim, seq)
            lacking -= self._chosen[victim].count if victim in self._chosen else 0
        if missing > 0 or lacking > 0 or not (self.seats or chosen):
            return False
        for victim in chosen:
            self._preempt(victim, now)
        return True

    def _grow(self, seq: Sequence, now: float) -> bool:
        """Blocks for all tokens of a running sequence, taken from the last ones if need be; else it waits."""
        while not self.kv.grow(seq):
            victim = max(self.running, key=lambda s: self._rank(s, now))
            if victim is seq:
                return False
            self._preempt(victim, now)
            self._tight = True
        return True

    def _preempt(self, seq: Sequence, now: float) -> None:
        """Back to waiting. What this iteration had for it goes back as well (vllm#23347)."""
        self.preemptions += 1
        if chunk := self._chosen.pop(seq, None):
            self._budget += chunk.count
        if seq in self.admitted:
            self.admitted.remove(seq)
        if self.kv.evict(seq):
            seq.timeline.swaps.append(now)
        self._leave(seq)
        self.gate.left()
        seq.preemptions += 1
        seq.timeline.preemptions.append(now)
        seq.status = Status.WAITING
        self.waiting.push(seq, now, first=self._protected(seq))

    def advance(self, chunks: list[Chunk]) -> None:
        """The chunks were computed: their KV is in the pool."""
        self.kv.written(chunks)
        self.policy.advanced(chunks)

    def took(self, seconds: float) -> None:
        """The iteration that was scheduled last took so long."""
        if self.learns:
            self.times.observe(self.load, seconds)

    def finish(self, seq: Sequence, reason: FinishReason, message: str | None = None) -> None:
        """End a sequence in whatever state it is; ending one twice changes nothing."""
        if seq.status is Status.FINISHED:
            return
        was, seq.status = seq.status, Status.FINISHED
        # An error may come from what is in the pool: nobody else is to read it.
        self.kv.release(seq, sound=reason != "error")
        if was is Status.RUNNING:
            self._leave(seq)
            self._tight = False
        else:
            self.waiting.remove(seq)
        if reason in ("stop", "length") and self.learns:
            self.lengths.ended(seq)
        seq.reason, seq.message = reason, message
        seq.timeline.finished = self.clock()

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.seats.append(seq.seat)
        seq.seat = -1
        self._long -= seq.long

    def check(self) -> None:
        """Raise AssertionError when the pool's book-keeping is off."""
        self.kv.check(self.running)
