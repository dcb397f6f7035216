"""Small traces in the form of the Azure ones, and a device whose arithmetic one can do by head."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from plait.engine.sim.profile import Iteration, Profile
from plait.engine.sim.trace import Row

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def device(num_blocks: int = 400, *, noise: float = 0.0, **engine: Any) -> Profile:
    """10 ms an iteration, 1 ms a prompt token and 1 ms a decode: at most 64 tokens in an iteration of 8 sequences."""
    return Profile(
        name="test",
        device="cpu",
        num_blocks=num_blocks,
        block_bytes=1000,
        copy_bytes_per_s=1e9,
        max_model_len=1000,
        vocab_size=1 << 30,
        iteration=Iteration(0.010, 0.001, 0.001, 0.0, 0.0, noise),
        engine={"max_running": 8, "token_budget": 64, **engine},
    )


def rows(n: int, per_second: float, seed: int = 0) -> list[Row]:
    """Poisson arrivals, lognormal lengths."""
    rng = random.Random(seed)
    at, made = 0.0, []
    for _ in range(n):
        made.append(
            Row(
                at,
                min(900, 1 + int(rng.lognormvariate(4, 0.8))),
                min(90, 1 + int(rng.lognormvariate(2.5, 0.8))),
            )
        )
        at += rng.expovariate(per_second)
    return made


def write(path: Path, rows: list[Row]) -> Path:
    begin = datetime(2026, 1, 1, 23, 59, 58)
    lines = [f"{begin + timedelta(seconds=r.at):%Y-%m-%d %H:%M:%S.%f}0,{r.prompt},{r.output}" for r in rows]
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return path
