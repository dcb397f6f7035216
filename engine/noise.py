"""Counter-based randomness: numbers that depend on (seed, position, lane) alone.

SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) from a start that seed and position choose; a continuation after a
crash, a preemption or a rebalance draws what the uninterrupted run would have drawn.
"""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel(seeds: np.ndarray, positions: np.ndarray, lanes: int) -> np.ndarray:
    """Standard Gumbel noise, float64 [R, lanes], for seeds [R] (uint64) and positions [R] (non-negative)."""
    with np.errstate(over="ignore"):
        start = _mix(_mix(seeds.astype(np.uint64)) ^ positions.astype(np.uint64))
        bits = _mix(start[:, None] + np.arange(lanes, dtype=np.uint64) * GOLDEN)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform))
