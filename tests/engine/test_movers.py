"""Copies between the device's pool and the host's."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.engine import pool
from plait.engine.config import EngineConfig
from plait.engine.movers import CpuMover, CudaMover, make_mover, runs
from plait.engine.pool import OutOfMemory
from plait.engine.swap_cost import SwapCosts

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def blocks(count: int) -> torch.Tensor:
    return torch.arange(count * 24, dtype=torch.float32).view(count, 2, 2, 1, 3, 2)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_neighbours_move_together_and_in_order(pairs: list[tuple[int, int]]) -> None:
    assert [(s + i, t + i) for s, t, count in runs(pairs) for i in range(count)] == pairs
    mover = CpuMover(blocks(6), 6, SwapCosts(96, 3))
    mover.memory.fill_(-1)
    expected = mover.memory.clone()
    for source, target in pairs:
        expected[target] = mover.pool[source]
    if pairs:
        mover.out(pairs)
    assert torch.equal(mover.memory, expected)


def test_a_block_comes_back_as_it_went() -> None:
    mover = make_mover(blocks(4), 3, SwapCosts(96, 3))
    before = mover.pool.clone()
    mover.out([(1, 2), (3, 0)])
    mover.pool.zero_()
    mover.into([(2, 0), (0, 3)])
    assert torch.equal(mover.pool[0], before[1]) and torch.equal(mover.pool[3], before[3])
    assert mover.seconds > 0 and make_mover(blocks(4), 0, SwapCosts(96, 3)) is None


class Device:
    """What CudaMover asks of torch.cuda, written down instead of done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[tuple[Any, ...]] = []
        self.finished: set[int] = set()
        self.events = 0
        iterations = SimpleNamespace(wait_event=lambda event: self.calls.append(("wait", event.number)))
        copies = SimpleNamespace(
            wait_stream=lambda stream: self.calls.append(("after", stream is iterations))
        )
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: copies)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: iterations)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream))
        monkeypatch.setattr(torch.cuda, "Event", self.event)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        self.events += 1
        number = self.events
        return SimpleNamespace(
            number=number,
            record=lambda stream: None,
            query=lambda: number in self.finished,
            elapsed_time=lambda other: 4.0,
        )


def test_an_iteration_waits_only_for_copies_of_its_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    mover = CudaMover(blocks(8), 8, SwapCosts(96, 3))
    mover.out([(0, 0), (1, 1)])  # events 1 and 2
    transfer = mover.into([(4, 5)])  # 3 and 4
    mover.out([(6, 6)])  # 5 and 6
    assert device.calls == [("after", True)] * 3, "copies begin after the iterations before them"
    device.calls.clear()
    mover.settle([[2, 3], [7]])
    assert device.calls == []
    mover.settle([[1, 3]])
    assert device.calls == [("wait", 2)]
    mover.settle([[0], [5, 2]])
    assert device.calls[1:] == [("wait", 4)], "the stream keeps the order: one event is enough"
    assert not transfer.done()
    device.finished |= {2, 4}
    mover.settle([[0, 5]])
    assert transfer.done() and len(device.calls) == 2 and len(mover.under_way) == 1
    assert mover.seconds == pytest.approx(8e-3)


def test_the_pool_s_size_is_by_device_and_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "free_bytes", lambda device: 64 << 30)
    per_block = 1 << 20
    assert pool.plan_host(EngineConfig(), per_block, CPU) == 1024
    assert pool.plan_host(EngineConfig(), per_block, CUDA) == 4096
    assert pool.plan_host(EngineConfig(swap_bytes=5 << 20), per_block, CPU) == 5
    assert pool.plan_host(EngineConfig(swap_bytes=0), per_block, CPU) == 0
    nothing_to_keep = EngineConfig(preemption="recompute", prefix_cache=False)
    assert pool.plan_host(nothing_to_keep, per_block, CPU) == 0
    for size in (65 << 30, 100):
        with pytest.raises(
            OutOfMemory, match=f"set swap_bytes to between {per_block} and 61847529062, or to 0"
        ):
            pool.plan_host(EngineConfig(swap_bytes=size), per_block, CPU)
    with pytest.raises(OutOfMemory, match=r"takes 64\.00 GiB of the 60\.00 GiB"):
        monkeypatch.setattr(pool, "free_bytes", lambda device: 60 << 30)
        pool.plan_host(EngineConfig(swap_bytes=33 << 30), per_block, CUDA)


@pytest.mark.parametrize(
    "wrong,named",
    [
        ({"preemption": "drop"}, "auto, swap or recompute"),
        ({"swap_bytes": -2}, "swap_bytes must not be negative"),
        ({"preemption": "swap", "swap_bytes": 0}, "set swap_bytes above 0"),
    ],
)
def test_settings_that_make_no_sense_are_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EngineConfig(**wrong)
