"""Drives Scheduler and BlockManager with a model that only counts, and checks every iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fake_mover import FakeMover
from plait.engine.api import GenerationRequest, Objectives, SamplingParams
from plait.engine.block_manager import BlockManager
from plait.engine.budget import MAX_SKIPS
from plait.engine.config import EngineConfig
from plait.engine.kv_cache import KvCache
from plait.engine.scheduler import Scheduler
from plait.engine.sequence import Chunk, Sequence, Status


@dataclass
class Drive:
    """A scheduler and what a model would have seen of it. `tokens` end at max_tokens, else at the pool's size."""

    num_blocks: int = 8
    block_size: int = 4
    max_running: int = 4
    token_budget: int = 1
    max_preemptions: int = 3
    watermark: float = 0.02
    policy: str = "priority"
    levers: dict[str, Any] = field(default_factory=dict)
    """Further settings of the engine."""
    host_blocks: int = 0
    preemption: str = "swap"
    prefix_cache: bool = False
    late: bool = False
    """Copies are made as late as they may be."""
    ahead: int = 0
    now: float = 0.0
    computed: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    """Of each sequence: the residence (its number of preemptions) and the positions computed in it."""
    seqs: list[Sequence] = field(default_factory=list)
    seconds: Callable[[list[Chunk]], float] = lambda chunks: 1.0
    """What an iteration takes."""
    steps: int = 0
    due: dict[Sequence, int] = field(default_factory=dict)
    """The iteration by which a sequence has to have ended."""

    def __post_init__(self) -> None:
        self.mover = FakeMover(self.num_blocks, self.host_blocks, self.block_size, self.late, self.ahead)
        self.kv = KvCache(
            BlockManager(self.num_blocks, self.block_size),
            host_blocks=self.host_blocks,
            mover=self.mover if self.host_blocks else None,
            preemption=self.preemption,
            prefix_cache=self.prefix_cache,
        )
        config = EngineConfig(
            max_running=self.max_running,
            token_budget=self.token_budget,
            max_preemptions=self.max_preemptions,
            watermark=self.watermark,
            policy=self.policy,
            **self.levers,
        )
        self.scheduler = Scheduler(self.kv, config, clock=lambda: self.now)

    @property
    def capacity(self) -> int:
        return self.num_blocks * self.block_size

    def add(
        self,
        prompt: int,
        max_tokens: int,
        priority: int = 4,
        arrival: float | None = None,
        *,
        shared: int | None = None,
        tenant: str = "",
        slo: tuple[float | None, float | None, float | None] = (None, None, None),
    ) -> Sequence:
        """All prompts begin with the same tokens; after `shared` of them they are this sequence's own.

        `slo`: seconds from its arrival to its first token, from one token to the next, and from arrival to the end.
        """
        self.now += 1
        number = len(self.seqs)
        common = prompt if shared is None else min(shared, prompt)
        request = GenerationRequest(
            str(number),
            list(range(common)) + [1_000_000 * (number + 1) + i for i in range(prompt - common)],
            SamplingParams(max_tokens=max_tokens),
            priority,
            tenant,
            arrival=self.now if arrival is None else arrival,
        )
        first, per_token, deadline = slo
        request.slo = Objectives(
            None if first is None else request.arrival + first,
            per_token,
            None if deadline is None else request.arrival + deadline,
        )
        seq = Sequence.of(request, self.now)
        self.seqs.append(seq)
        self.scheduler.add(seq)
        return seq

    def cancel(self, seq: Sequence) -> None:
        self.scheduler.finish(seq, "cancelled")

    def step(self) -> list[Chunk]:
        self.now += 1
        self.steps += 1
        self._promise()
        scheduler, had_work = self.scheduler, self.scheduler.has_work()
        before = {seq: seq.preemptions for seq in scheduler.running}
        chunks = scheduler.schedule()
        self._check_chunks(chunks, before)
        assert bool(chunks) == had_work or (not before and scheduler.pause() > 0), (
            "an iteration with work makes progress"
        )
        self.mover.settle([block for chunk in chunks for block in chunk.seq.blocks])
        for chunk in chunks:
            self.mover.compute(chunk.seq, chunk.count)
        scheduler.advance(chunks)
        if chunks:
            seconds = self.seconds(chunks)
            self.now += seconds - 1
            scheduler.took(seconds)
        for chunk in chunks:
            seq = chunk.seq
            self.computed[seq] = (seq.preemptions, seq.computed)
            if seq.remaining == 0:
                if seq.timeline.first_token is None:
                    seq.timeline.first_token = self.now
                seq.tokens.append(1000 + len(seq.tokens))
                if seq.output_len >= seq.sampling.max_tokens or len(seq.tokens) >= self.capacity:
                    scheduler.finish(seq, "length")
        self.check_pool()
        for seq, last in self.due.items():
            assert seq.status is Status.FINISHED or self.steps <= last, "it starves"
        return chunks

    def _promise(self) -> None:
        """Note by which iteration those that have waited long enough have to end: Scheduler's own bound."""
        scheduler, config = self.scheduler, self.scheduler.config
        for seq in self.seqs:
            waited = self.now - seq.timeline.arrived
            if seq in self.due or seq.status is Status.FINISHED or waited < config.max_wait_seconds:
                continue
            age = (seq.timeline.arrived, seq.number)
            before = [s for s in self.seqs if s.status is not Status.FINISHED]
            if config.batching == "continuous":
                before = [s for s in before if (s.timeline.arrived, s.number) <= age]
            elif not scheduler.gate.places:
                before = [
                    s for s in before if (s.timeline.arrived, s.number) <= age or s.status is Status.RUNNING
                ]
            self.due[seq] = self.steps + sum(self._iterations(s) for s in before)

    def _iterations(self, seq: Sequence) -> int:
        """How many a sequence takes at most when it comes first."""
        output = seq.sampling.max_tokens - seq.output_len
        return -(-len(seq.tokens) // self.block_size) + output + 1

    def _check_chunks(self, chunks: list[Chunk], before: dict[Sequence, int]) -> None:
        scheduler, blocks = self.scheduler, self.scheduler.kv.blocks
        assert sum(c.count for c in chunks) <= scheduler.token_budget
        assert [c.count > 1 for c in chunks] == sorted(c.count > 1 for c in chunks), (
            "single tokens come first"
        )
        assert len({c.seq for c in chunks}) == len(chunks), "a sequence has one chunk"
        for chunk in chunks:
            seq = chunk.seq
            assert seq.status is Status.RUNNING, "a chunk of a sequence that does not run"
            self._check_progress(seq)
            assert 1 <= chunk.count <= seq.remaining
            assert seq.computed + chunk.count <= len(seq.blocks) * self.block_size, "no memory for the chunk"
        chosen = {c.seq for c in chunks}
        for seq, preemptions in before.items():
            if seq.preemptions > preemptions:
                self._check_victim(seq)
            elif seq not in chosen and not self.late:
                assert seq.remaining == 1, "a partly prefilled prompt got nothing"
                if seq.skipped:
                    assert seq.skipped <= MAX_SKIPS
                    continue
                # It decodes and memory is out: nobody behind it is left to be preempted for it.
                missing = blocks.needed(len(seq.blocks), len(seq.tokens))
                last = max(scheduler.running, key=lambda s: scheduler._rank(s, self.now))
                assert missing > 0 and last is seq
        seats = [seq.seat for seq in scheduler.running]
        assert len(set(seats)) == len(seats) and all(0 <= seat < self.max_running for seat in seats)

    def _check_progress(self, seq: Sequence) -> None:
        """It goes on where it was, unless it was put out and not swapped: then where the prefix cache lets it begin."""
        residence, done = self.computed.get(seq, (-1, 0))
        since = seq.timeline.preemptions[residence:]
        kept = residence >= 0 and all(at in seq.timeline.swaps for at in since)
        if kept:
            assert seq.computed == done, "computed twice, or left out"
        elif self.prefix_cache:
            assert seq.computed % self.block_size == 0 and seq.computed < len(seq.tokens)
        else:
            assert seq.computed == 0, "computed by nobody"

    def _check_victim(self, victim: Sequence) -> None:
        assert victim.status is not Status.FINISHED
        if victim.preemptions > max(self.max_preemptions, 1):
            first = min(self.scheduler.running, key=lambda seq: (seq.timeline.arrived, seq.number))
            assert (first.timeline.arrived, first.number) < (victim.timeline.arrived, victim.number), (
                "a protected sequence made room for one that is younger"
            )

    def check_pool(self) -> None:
        self.scheduler.check()
        held = [block for seq in self.scheduler.running for block in seq.blocks[len(seq.pages) :]]
        assert len(set(held)) == len(held), "a block has two owners"
        for seq in self.seqs:
            if seq.status is not Status.RUNNING:
                assert not seq.blocks and seq.seat == -1

    def finish_all(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work():
                break
            self.step()
        self.check_idle()

    def check_idle(self) -> None:
        assert not self.scheduler.has_work() and not self.scheduler.running
        assert len(self.scheduler.waiting) == 0
        self.kv.check_idle()
        blocks = self.kv.blocks
        assert sorted([*blocks.free, *blocks.kept]) == list(range(self.num_blocks)), "the pool is not whole"
        assert sorted(self.scheduler.seats) == list(range(self.max_running))
        for seq in self.seqs:
            assert seq.status is Status.FINISHED
            if seq.reason == "length":
                full = min(seq.prompt_len + seq.sampling.max_tokens, self.capacity)
                assert len(seq.tokens) == full, "a token was lost"


class Driven(RuleBasedStateMachine):
    """What all machines around a Drive do: `drive` is made by their own `initialize`."""

    drive: Drive

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.drive.step()

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "drive"):
            self.drive.check_pool()

    def teardown(self) -> None:
        if hasattr(self, "drive"):
            self.drive.finish_all()
