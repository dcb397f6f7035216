"""Copies KV blocks between the device's pool and one in the host's memory: what `transfer.Mover` asks for.

Both pools have the layout of `kernels.batch.Batch.pool`, so that a block moves with one copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from plait.engine.swap_cost import SwapCosts
from plait.engine.transfer import Pairs


def make_mover(pool: Tensor, host_blocks: int, costs: SwapCosts) -> CpuMover | CudaMover | None:
    """None where there is nothing to copy to."""
    if not host_blocks:
        return None
    return (CudaMover if pool.is_cuda else CpuMover)(pool, host_blocks, costs)


def runs(pairs: Pairs) -> Iterator[tuple[int, int, int]]:
    """(source, target, count): neighbours that go to neighbours move together."""
    begin = 0
    for i in range(1, len(pairs) + 1):
        source, target = pairs[begin]
        if i == len(pairs) or pairs[i] != (source + i - begin, target + i - begin):
            yield source, target, i - begin
            begin = i


def copy(source: Tensor, target: Tensor, pairs: Pairs) -> None:
    """In the order of the pairs, as one block may be written twice."""
    for s, t, count in runs(pairs):
        target[t : t + count].copy_(source[s : s + count], non_blocking=True)


class CpuMover:
    """From memory to memory, at once."""

    ahead = 0

    def __init__(self, pool: Tensor, host_blocks: int, costs: SwapCosts):
        self.pool, self.costs = pool, costs
        # Taken only as blocks are first used.
        self.memory = torch.empty(host_blocks, *pool.shape[1:], dtype=pool.dtype)
        self.seconds = 0.0

    def out(self, pairs: Pairs) -> None:
        self._copy(self.pool, self.memory, pairs, out=True)

    def into(self, pairs: Pairs) -> None:
        self._copy(self.memory, self.pool, pairs, out=False)

    def _copy(self, source: Tensor, target: Tensor, pairs: Pairs, *, out: bool) -> None:
        begun = perf_counter()
        copy(source, target, pairs)
        seconds = perf_counter() - begun
        self.seconds += seconds
        self.costs.moved(len(pairs), seconds, out=out)

    def settle(self, tables: Iterable[list[int]]) -> None:
        """Nothing is ever under way."""


@dataclass(slots=True, eq=False)
class CudaTransfer:
    begun: torch.cuda.Event
    ended: torch.cuda.Event
    blocks: frozenset[int]
    """Of the device."""
    out: bool

    def done(self) -> bool:
        return self.ended.query()


class CudaMover:
    """Over a stream of its own, beside the iterations, from and to pinned memory.

    A copy starts when the iterations that were launched before it are done, since they wrote or read its blocks.
    An iteration launched after it waits for it only if it uses one of its blocks (`settle`).
    """

    ahead = 32

    def __init__(self, pool: Tensor, host_blocks: int, costs: SwapCosts):
        self.pool, self.costs = pool, costs
        self.memory = torch.empty(host_blocks, *pool.shape[1:], dtype=pool.dtype, pin_memory=pool.is_cuda)
        self.stream = torch.cuda.Stream(pool.device)
        self.under_way: deque[CudaTransfer] = deque()
        self.seconds = 0.0

    def out(self, pairs: Pairs) -> None:
        self._begin(self.pool, self.memory, pairs, frozenset(block for block, _ in pairs), out=True)

    def into(self, pairs: Pairs) -> CudaTransfer:
        return self._begin(self.memory, self.pool, pairs, frozenset(block for _, block in pairs), out=False)

    def _begin(
        self, source: Tensor, target: Tensor, pairs: Pairs, blocks: frozenset[int], *, out: bool
    ) -> CudaTransfer:
        transfer = CudaTransfer(
            torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), blocks, out
        )
        self.stream.wait_stream(torch.cuda.current_stream(self.pool.device))
        with torch.cuda.stream(self.stream):
            transfer.begun.record(self.stream)
            copy(source, target, pairs)
            transfer.ended.record(self.stream)
        self.under_way.append(transfer)
        return transfer

    def settle(self, tables: Iterable[list[int]]) -> None:
        """What is launched from now on waits for the copies that concern blocks of these tables."""
        self._retire()
        if not self.under_way:
            return
        moving = frozenset[int]().union(*(t.blocks for t in self.under_way))
        used: set[int] = set()
        for table in tables:
            used |= moving.intersection(table)
        # The stream keeps their order: the last one is done when all are.
        last = next((t for t in reversed(self.under_way) if not t.blocks.isdisjoint(used)), None)
        if last is not None:
            torch.cuda.current_stream(self.pool.device).wait_event(last.ended)

    def _retire(self) -> None:
        while self.under_way and self.under_way[0].done():
            transfer = self.under_way.popleft()
            seconds = transfer.begun.elapsed_time(transfer.ended) / 1000
            self.seconds += seconds
            self.costs.moved(len(transfer.blocks), seconds, out=transfer.out)
