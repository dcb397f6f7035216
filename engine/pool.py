"""The KV pool's size and memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from plait.engine.config import EngineConfig

GIB = 1 << 30


class OutOfMemory(RuntimeError):
    """The pool does not fit; the message names the setting to change, and to what."""


def block_bytes(layers: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype) -> int:
    return layers * 2 * kv_heads * block_size * dim * dtype.itemsize


def plan(config: EngineConfig, per_block: int, device: torch.device, reserve: int = 0) -> int:
    """How many blocks the pool gets; one of a size by default leaves `reserve` bytes free. Raises OutOfMemory when they
    cannot fit."""
    free = free_bytes(device)
    if config.num_blocks:
        wanted = config.num_blocks * per_block
    elif config.kv_cache_bytes:
        wanted = config.kv_cache_bytes
    elif device.type == "cuda":
        wanted = int((free - reserve) * 0.9)
    else:
        wanted = min(GIB, free // 4)
    blocks = wanted // per_block
    if wanted > free or blocks < 1:
        fits = int(free * 0.9)
        raise OutOfMemory(
            f"a KV pool of {wanted / GIB:.2f} GiB ({blocks} blocks of {per_block} bytes) does not fit into the "
            f"{free / GIB:.2f} GiB that are free: set kv_cache_bytes to between {per_block} and {fits}, or num_blocks "
            f"to at most {fits // per_block}"
        )
    return blocks


def plan_host(config: EngineConfig, per_block: int, device: torch.device) -> int:
    """How many blocks the pool in the host's memory gets. Raises OutOfMemory when they cannot fit."""
    if not config.swap_bytes or (config.preemption == "recompute" and not config.prefix_cache):
        return 0
    free = free_bytes(torch.device("cpu"))
    if config.swap_bytes < 0:
        wanted = min((4 if device.type == "cuda" else 1) * GIB, free // 4)
    else:
        wanted = config.swap_bytes
        # Pinned memory is taken in powers of two.
        taken = 1 << (wanted - 1).bit_length() if device.type == "cuda" else wanted
        if taken > free or wanted < per_block:
            raise OutOfMemory(
                f"a CPU pool of {wanted} bytes takes {taken / GIB:.2f} GiB of the {free / GIB:.2f} GiB that are free, "
                f"for {wanted // per_block} blocks of {per_block} bytes: set swap_bytes to between {per_block} and "
                f"{int(free * 0.9)}, or to 0"
            )
    return wanted // per_block


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with Path("/proc/meminfo").open() as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def make(
    blocks: int,
    layers: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """[blocks, layers, 2, kv_heads, block_size, dim]: all layers of a block adjacent, so that it moves with one copy.

    The memory of a CPU pool is touched, and so taken, only as blocks are first used.
    """
    return torch.empty(blocks, layers, 2, kv_heads, block_size, dim, dtype=dtype, device=device)
