"""Fairness between tenants: the bound of the VTC paper, and that nobody saves up credit."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.engine.policies.fair import INPUT, OUTPUT
from scheduling import Drive

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 4.0}


class Service:
    """Drives tenants that always have requests waiting, and counts what they get, divided by their weights."""

    def __init__(self, tenants: dict[str, list[tuple[int, int]]], **knobs: int):
        self.drive = Drive(
            **knobs, policy="fair", levers={"tenant_weights": WEIGHTS, "max_wait_seconds": 1e9}
        )
        self.sizes = {tenant: iter(sizes * 10_000) for tenant, sizes in tenants.items()}
        self.waiting: Counter[str] = Counter()
        self.got = dict.fromkeys(tenants, 0.0)
        self.seen: dict[object, int] = {}

    def top_up(self, tenant: str) -> None:
        waits = sum(seq.tenant == tenant for seq in self.drive.scheduler.waiting)
        for _ in range(8 - waits):
            prompt, output = next(self.sizes[tenant])
            self.drive.add(prompt, output, tenant=tenant)

    def step(self) -> None:
        for seq in [chunk.seq for chunk in self.drive.step()]:
            served = min(seq.computed, seq.prompt_len) * INPUT + seq.output_len * OUTPUT
            self.got[seq.tenant] += (served - self.seen.get(seq, 0)) / WEIGHTS[seq.tenant]
            self.seen[seq] = served


sizes = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), sizes, min_size=2),
    st.integers(8, 24),
    st.integers(1, 6),
    st.integers(1, 30),
)
def test_the_gap_between_backlogged_tenants_is_bounded(
    tenants: dict[str, list[tuple[int, int]]], num_blocks: int, max_running: int, token_budget: int
) -> None:
    """Theorem 4.4: at most 2 max(w_in * longest prompt, w_out * tokens in the pool), over any interval."""
    service = Service(tenants, num_blocks=num_blocks, max_running=max_running, token_budget=token_budget)
    bound = 2 * max(INPUT * 20, OUTPUT * num_blocks * service.drive.block_size)
    low: Counter[tuple[str, str]] = Counter()
    for _ in range(150):
        for tenant in tenants:
            service.top_up(tenant)
        service.step()
        for one in tenants:
            for other in tenants:
                gap = service.got[one] - service.got[other]
                low[one, other] = min(low[one, other], gap)
                assert gap - low[one, other] <= bound


def test_shares_follow_weights() -> None:
    service = Service({"a": [(4, 4)], "c": [(4, 4)]}, num_blocks=16, max_running=4, token_budget=16)
    for _ in range(400):
        service.top_up("a")
        service.top_up("c")
        service.step()
    assert service.got["c"] == pytest.approx(service.got["a"], rel=0.1), "by weight"


def test_a_tenant_that_asked_for_nothing_has_no_credit() -> None:
    service = Service({"a": [(4, 4)], "b": [(4, 4)]}, num_blocks=16, max_running=2, token_budget=16)
    for _ in range(200):
        service.top_up("a")
        service.step()
    service.got = dict.fromkeys("ab", 0.0)
    for _ in range(200):
        service.top_up("a")
        service.top_up("b")
        service.step()
    assert service.got["a"] == pytest.approx(service.got["b"], rel=0.15)


def test_counters_of_tenants_that_left_are_forgotten() -> None:
    drive = Drive(num_blocks=16, policy="fair")
    for i in range(500):
        drive.add(1, 1, tenant=f"tenant-{i}")
        drive.finish_all()
    assert len(drive.scheduler.policy.shares.counters) < 10
