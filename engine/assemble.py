"""Puts a scheduler together from an engine's configuration: the same one for a real device and a simulated one."""

from __future__ import annotations

from collections.abc import Callable

from plait.engine.block_manager import BlockManager
from plait.engine.config import EngineConfig
from plait.engine.kv_cache import KvCache
from plait.engine.policy import make_policy
from plait.engine.scheduler import Scheduler

DEFAULT_BUDGET = {"cpu": 256}


def make_scheduler(
    config: EngineConfig, num_blocks: int, device: str, clock: Callable[[], float]
) -> Scheduler:
    """`device` is the type, `cpu` or `cuda`: what the configuration leaves open depends on it."""
    return Scheduler(
        KvCache(BlockManager(num_blocks, config.block_size)),
        make_policy(config.policy),
        max_running=config.max_running,
        token_budget=config.token_budget or DEFAULT_BUDGET.get(device, 2048),
        max_preemptions=config.max_preemptions,
        watermark=config.watermark,
        clock=clock,
    )
