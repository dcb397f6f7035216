"""Puts a scheduler together from an engine's configuration: the same one for a real device and a simulated one."""

from __future__ import annotations

from collections.abc import Callable

from plait.engine.block_manager import BlockManager
from plait.engine.config import EngineConfig
from plait.engine.kv_cache import KvCache
from plait.engine.scheduler import Scheduler


def make_scheduler(
    config: EngineConfig, num_blocks: int, device: str, clock: Callable[[], float]
) -> Scheduler:
    """`device` is the type, `cpu` or `cuda`: what the configuration leaves open depends on it."""
    kv = KvCache(BlockManager(num_blocks, config.block_size))
    return Scheduler(kv, config, clock=clock, device=device)
