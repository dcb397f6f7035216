"""Swapping and the prefix cache under random traffic: what a sequence reads is what its own tokens wrote."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from scheduling import Drive, Driven


class Pressure(Driven):
    """Prompts with common beginnings, of two tenants, in pools that are too small; copies come late, or never."""

    @initialize(
        num_blocks=st.integers(1, 10),
        block_size=st.integers(1, 4),
        max_running=st.integers(1, 5),
        token_budget=st.integers(1, 24),
        max_preemptions=st.integers(0, 3),
        watermark=st.sampled_from([0.0, 0.02, 0.3]),
        host_blocks=st.integers(0, 12),
        preemption=st.sampled_from(["swap", "recompute", "auto"]),
        prefix_cache=st.booleans(),
        late=st.booleans(),
        ahead=st.integers(0, 4),
    )
    def begin(self, **knobs: Any) -> None:
        self.drive = Drive(**knobs)

    @precondition(lambda self: self.drive.capacity > 1)
    @rule(
        data=st.data(),
        max_tokens=st.integers(1, 16),
        priority=st.integers(0, 9),
        shared=st.integers(0, 30),
        tenant=st.sampled_from("aab"),
    )
    def add(self, data: st.DataObject, **fields: Any) -> None:
        self.drive.add(data.draw(st.integers(1, self.drive.capacity - 1), label="prompt"), **fields)

    @precondition(lambda self: self.drive.seqs)
    @rule(data=st.data(), reason=st.sampled_from(["cancelled", "error"]))
    def end(self, data: st.DataObject, reason: Any) -> None:
        self.drive.scheduler.finish(data.draw(st.sampled_from(self.drive.seqs)), reason)

    @rule(copies=st.integers(1, 3))
    def catch_up(self, copies: int) -> None:
        self.drive.mover.catch_up(copies)

    @rule()
    def clear(self) -> None:
        self.drive.kv.clear()


TestPressure = Pressure.TestCase
TestPressure.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
