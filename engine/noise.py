"""Counter-based randomness: a number that depends on (seed, position) alone.

SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) applied twice; a continuation after a crash, a preemption or a
rebalance draws what the uninterrupted run would have drawn.
"""

from __future__ import annotations

import numpy as np


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) for seeds (uint64) and positions (non-negative)."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds.astype(np.uint64)) ^ positions.astype(np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
