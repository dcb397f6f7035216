"""Tile sizes and splits of the attention kernel: fixed choices by device, type and head size, no autotuning.

The choices keep within the shared memory of the device class and within its registers (no spills); a test
compiles them ahead of time and checks both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

LEAST_KEYS = 256
PROGRAMS_A_PROCESSOR = 2


@dataclass(frozen=True, slots=True)
class Device:
    capability: tuple[int, int]
    processors: int
    """Streaming multiprocessors."""


@dataclass(frozen=True, slots=True)
class Launch:
    decode: bool
    head_pad: int
    """head_dim rounded up to a power of two."""
    tile_m: int
    """Rows of queries: tokens times query heads of one kv head."""
    tile_n: int
    """Keys of one step."""
    num_warps: int
    num_stages: int

    def constants(
        self, pool: Tensor, heads: int, window: int | None, softcap: float | None
    ) -> tuple[object, ...]:
        """The compile-time arguments of the attention kernel, in its order."""
        _, num_layers, _, kv_heads, block_size, head_dim = pool.shape
        kinds = (self.decode, window or 0, softcap or 0.0)
        heads_and_blocks = (num_layers, kv_heads, heads // kv_heads, block_size, head_dim)
        return (*kinds, *heads_and_blocks, self.head_pad, self.tile_m, self.tile_n)


@cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device((8, 0), 1)
    found = torch.cuda.get_device_properties(device)
    return Device((found.major, found.minor), found.multi_processor_count)


@cache
def launch_for(device: Device, dtype: torch.dtype, head_dim: int, group: int, *, decode: bool) -> Launch:
    """The tiles for queries of `group` heads per kv head.

    Hopper and data-centre Blackwell (9.x, 10.x) multiply by warp groups and have 227 KiB of shared memory a
    block. All others share one choice within 99 KiB, the least of them (8.6, 8.9, 12.x).
    """
    pad = _power_of_two(head_dim)
    large = device.capability[0] in (9, 10)
    few = decode and group <= 32
    if dtype == torch.float32:
        tiles = (16, 16, 4, 3) if few else (32, 16, 8, 2)
    elif few:
        tiles = (16, 64 if pad <= 128 else 32, 4, 3)
    elif pad <= 64:
        tiles = (128, 64, 8, 3)
    elif pad <= 128:
        tiles = (128, 64 if large else 32, 8, 3)
    else:
        tiles = (128 if large else 64, 32, 8, 2)
    tile_m, tile_n, warps, stages = tiles
    return Launch(decode, pad, max(tile_m, _power_of_two(group)), tile_n, warps, stages)


@dataclass(frozen=True, slots=True)
class Cut:
    """How decodes are cut along their keys: into at most `wanted` pieces beyond one each, of `least` tiles or more."""

    wanted: int
    least: int


@cache
def cut_for(device: Device, kv_heads: int, tile_n: int) -> Cut:
    """Pieces enough to give each processor two programs, but none below 256 keys, which cost more than they gain."""
    return Cut(max(1, PROGRAMS_A_PROCESSOR * device.processors // kv_heads), -(-LEAST_KEYS // tile_n))


def _power_of_two(number: int) -> int:
    return max(16, 1 << (number - 1).bit_length())
