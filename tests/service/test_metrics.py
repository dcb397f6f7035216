"""What the engine counts, as Prometheus sees it."""

from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import generate_latest

from plait.engine.api import EngineStats
from plait.service.metrics import Metrics


def test_memory_counters_are_exported() -> None:
    stats = EngineStats(
        swaps=2,
        swapped_out_blocks=7,
        swapped_in_blocks=5,
        host_blocks=10,
        host_blocks_used=4,
        prefix_queried_tokens=100,
        prefix_hit_tokens=30,
    )
    metrics = Metrics()
    metrics.watch(cast(Any, SimpleNamespace(stats=stats)))
    lines = generate_latest(metrics.registry).decode().splitlines()
    assert {
        "plait_engine_swaps_total 2.0",
        'plait_engine_swapped_blocks_total{direction="out"} 7.0',
        'plait_engine_swapped_blocks_total{direction="in"} 5.0',
        'plait_engine_host_blocks{state="used"} 4.0',
        'plait_engine_host_blocks{state="free"} 6.0',
        'plait_engine_prefix_tokens_total{result="hit"} 30.0',
        'plait_engine_prefix_tokens_total{result="miss"} 70.0',
    } <= set(lines)
