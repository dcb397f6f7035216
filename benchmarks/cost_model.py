"""Measures how long an iteration of the engine takes by what it computes, and writes a device profile of it.

`python -m benchmarks.cost_model --out engine/sim/cpu.toml` runs SmolLM2 in bf16 on the CPU over a grid of batches
and then under mixed traffic, about a minute on two cores. The coefficients are the non-negative ones of the least
squares of relative errors over both; the fit's error is printed for each part.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plait.engine import pool
from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
from plait.engine.process import environment
from plait.engine.sim.profile import work

NAMES = ("fixed", "prefill_token", "decode", "kv_token", "pair")
DECODES, CONTEXTS = (1, 4, 16, 32, 64), (16, 128)
CHUNKS = (16, 32, 64, 96, 128, 192, 256)
ITERATIONS = 7
Sample = tuple[tuple[int, ...], float]
"""What an iteration computed, and its seconds."""


class Meter:
    """Times iterations and notes what they compute."""

    def __init__(self, engine: Engine):
        self.engine, self.samples = engine, []
        self._random, self._numbers, self._run = random.Random(0), itertools.count(), engine.runner.run
        engine.runner.run = self._spy

    def _spy(self, chunks: list[Any]) -> Any:
        self._work = work(chunks)
        return self._run(chunks)

    def add(self, prompt: int, tokens: int) -> None:
        ids = [self._random.randrange(1000, 40_000) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        self.engine.add(GenerationRequest(str(next(self._numbers)), ids, sampling))

    def step(self) -> Sample:
        began = time.perf_counter()
        self.engine.step()
        return self._work, time.perf_counter() - began

    def clear(self) -> None:
        for name in list(self.engine.seqs):
            self.engine.cancel(name)

    def decodes(self, context: int) -> list[Sample]:
        """One sample for each number of sequences that decode: the median of some iterations."""
        found = []
        for count in DECODES:
            if count * context > 8_192:
                break
            for _ in range(count - len(self.engine.seqs)):
                self.add(context, 400)
            while self.engine.scheduler.waiting or any(
                s.remaining > 1 for s in self.engine.scheduler.running
            ):
                self.engine.step()
            times = [self.step() for _ in range(ITERATIONS)]
            seconds = statistics.median(seconds for _, seconds in times)
            found.append((times[ITERATIONS // 2][0], seconds))
        self.clear()
        return found

    def prefills(self) -> list[Sample]:
        """Chunks of all sizes, one after another, of a long prompt."""
        scheduler = self.engine.scheduler
        budget, found = scheduler.token_budget, []
        self.add(2 * sum(CHUNKS) + 1, 1)
        for scheduler.token_budget in CHUNKS * 2:
            found.append(self.step())
        scheduler.token_budget = budget
        self.clear()
        return found

    def traffic(self, seconds: float) -> list[Sample]:
        """Samples of iterations under arrivals that keep the batch about half full."""
        until, found = time.perf_counter() + seconds, []
        while time.perf_counter() < until:
            while len(self.engine.seqs) < 40 and self._random.random() < 0.5:
                length = int(self._random.lognormvariate(4.5, 0.9)) + 1
                self.add(min(length, 1500), self._random.randint(8, 120))
            if self.engine.has_work():
                found.append(self.step())
        self.clear()
        return found


def fit(samples: list[Sample]) -> np.ndarray:
    """Non-negative least squares of the relative error, over all choices of coefficients that are not zero."""
    rows = np.array([[1.0, *load] for load, _ in samples]) / np.array([[s] for _, s in samples])
    scale = rows.max(axis=0)
    best, best_error = np.zeros(len(NAMES)), np.inf
    for size in range(1, len(NAMES) + 1):
        for chosen in map(list, itertools.combinations(range(len(NAMES)), size)):
            found = np.linalg.lstsq(rows[:, chosen] / scale[chosen], np.ones(len(rows)), rcond=None)[0]
            if (found < 0).any():
                continue
            candidate = np.zeros(len(NAMES))
            candidate[chosen] = found / scale[chosen]
            error = float(np.linalg.norm(rows @ candidate - 1))
            if error < best_error:
                best, best_error = candidate, error
    return best


def errors(samples: list[Sample], theta: np.ndarray) -> np.ndarray:
    """Predicted over measured, minus one."""
    return np.array([theta @ [1.0, *load] / seconds - 1 for load, seconds in samples])


def copy_speed(block_bytes: int) -> float:
    """Bytes a second when blocks are copied from one pool to another."""
    count = (256 << 20) // block_bytes
    one, two = (torch.ones(count, block_bytes, dtype=torch.uint8) for _ in range(2))
    order = torch.randperm(count).tolist()
    began = time.perf_counter()
    for a, b in zip(order, reversed(order), strict=True):
        two[b].copy_(one[a])
    return count * block_bytes / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=15.0, help="of mixed traffic")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if "OMP_WAIT_POLICY" not in os.environ:
        # The engine's process gets these from its parent, before torch is loaded.
        command = [sys.executable, "-m", "benchmarks.cost_model", *sys.argv[1:]]
        os.execve(sys.executable, command, environment(EngineConfig()))
    engine = Engine(EngineConfig(model=args.model, dtype=args.dtype, device="cpu"))
    engine.warm_up()
    meter = Meter(engine)
    grid = [sample for context in CONTEXTS for sample in meter.decodes(context)]
    grid += [sample for _ in range(2) for sample in meter.prefills()]
    traffic = meter.traffic(args.seconds)
    # The grid spans what can be asked for; the traffic is what happens, and shows how much iterations differ.
    weight = max(1, len(traffic) // (4 * len(grid)))
    theta = fit(grid * weight + traffic)
    for load, seconds in grid:
        print(f"{load}: {seconds * 1e3:.1f} ms, predicted {theta @ [1.0, *load] * 1e3:.1f}")
    for name, samples in (("grid", grid), ("traffic", traffic)):
        off = errors(samples, theta)
        print(
            f"{name}: {len(samples)} samples, mean error {np.abs(off).mean():.1%}, "
            f"90% within {np.quantile(np.abs(off), 0.9):.1%}, bias {off.mean():+.1%}"
        )
    held = fit(grid)
    print(f"fitted to the grid alone, mean error of the traffic {np.abs(errors(traffic, held)).mean():.1%}")
    # Half the width of the middle two thirds: a few iterations that something else disturbed do not count.
    low, high = np.quantile(errors(traffic, theta), (1 / 6, 5 / 6))
    kv, size = engine.runner.attention.pool, engine.model.block_size
    block_bytes = pool.block_bytes(kv.shape[1], kv.shape[3], kv.shape[5], size, engine.runner.dtype)
    text = f"""# Measured by benchmarks/cost_model.py: {args.model}, {args.dtype}, {torch.get_num_threads()} cores.
device = "cpu"
num_blocks = {engine.model.num_blocks}
block_bytes = {block_bytes}
copy_bytes_per_s = {copy_speed(block_bytes):.2g}
max_model_len = {engine.model.max_tokens_total}
vocab_size = {engine.model.vocab_size}

[iteration]
""" + "".join(f"{name} = {value:.3g}\n" for name, value in zip(NAMES, theta, strict=True))
    text += f"noise = {(high - low) / 2:.2g}\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
