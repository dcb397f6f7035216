"""Puts a scheduler together from an engine's configuration: the same one for a real device and a simulated one."""

from __future__ import annotations

from collections.abc import Callable

from plait.engine.block_manager import BlockManager
from plait.engine.config import EngineConfig
from plait.engine.kv_cache import KvCache
from plait.engine.scheduler import Scheduler
from plait.engine.swap_cost import SwapCosts
from plait.engine.transfer import Mover


def make_scheduler(
    config: EngineConfig,
    num_blocks: int,
    device: str,
    clock: Callable[[], float],
    *,
    host_blocks: int = 0,
    mover: Mover | None = None,
    costs: SwapCosts | None = None,
) -> Scheduler:
    """`device` is the type, `cpu` or `cuda`: what the configuration leaves open depends on it. Without a mover nothing
    is swapped."""
    kv = KvCache(
        BlockManager(num_blocks, config.block_size),
        host_blocks=host_blocks,
        mover=mover,
        costs=costs,
        preemption=config.preemption,
        prefix_cache=config.prefix_cache,
    )
    scheduler = Scheduler(kv, config, clock=clock, device=device)
    if costs is not None:
        costs.times = scheduler.times
    return scheduler
