"""The ideal time of a workload on this machine: bytes over measured bandwidth, operations over measured peak.

Each iteration has to read all weights once and the KV of its sequences, and to multiply each token with each
weight; the slower of the two is its ideal time. Prompts are computed in the first iterations of their sequences,
seats are filled as they become free, and nothing else costs anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.workload import Item
from transformers import AutoConfig


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_s: float
    flops: float


@dataclass(frozen=True, slots=True)
class Shape:
    """Weights that every token meets, weights that only sampled tokens meet, and KV bytes a token."""

    body: int
    head: int
    kv_bytes: int
    itemsize: int


def measure(dtype: torch.dtype) -> Machine:
    """Medians of the rates that one sequential read and one large matrix product reach here."""
    big = torch.ones(256 << 20, dtype=torch.uint8).view(torch.int64)
    a = torch.randn(2048, 4096).to(dtype)
    b = torch.randn(4096, 4096).to(dtype)
    read = big.numel() * 8 / median(lambda: big.sum())
    return Machine(read, 2 * 2048 * 4096 * 4096 / median(lambda: a @ b.T))


def median(work: Callable[[], object], runs: int = 7) -> float:
    work()
    times = []
    for _ in range(runs):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def shape(path: Path, dtype: torch.dtype) -> Shape:
    c = AutoConfig.from_pretrained(path)
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    attention = c.hidden_size * dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    body = c.num_hidden_layers * (attention + 3 * c.hidden_size * c.intermediate_size)
    kv = c.num_hidden_layers * 2 * c.num_key_value_heads * dim * dtype.itemsize
    return Shape(body, c.vocab_size * c.hidden_size, kv, dtype.itemsize)


def ideal_seconds(items: list[Item], seats: int, model: Shape, machine: Machine) -> float:
    waiting = list(items)
    running: list[list[int]] = []
    total = 0.0
    while waiting or running:
        tokens = len(running)
        while waiting and len(running) < seats:
            item = waiting.pop(0)
            running.append([len(item.prompt), item.output_tokens])
            tokens += len(item.prompt)
        work = 2 * (tokens * model.body + len(running) * model.head)
        read = (model.body + model.head) * model.itemsize + sum(r[0] for r in running) * model.kv_bytes
        total += max(work / machine.flops, read / machine.bytes_per_s)
        for r in running:
            r[0], r[1] = r[0] + 1, r[1] - 1
        running = [r for r in running if r[1] > 0]
    return total
