"""Triton kernels that put new keys and values into the paged cache, and that copy whole blocks.

The layout is that of PagedAttention (Kwon et al. 2023, arXiv:2309.06180), all layers of a block adjacent.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton_launch import launch


@triton.jit(do_not_specialize=["layer"])
def write_kernel(
    pool,
    k,
    v,
    slots,
    layer,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    NUM_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = element < KV_HEADS * HEAD_DIM
    head = element // HEAD_DIM
    dim = element % HEAD_DIM
    plane = ((slot // BLOCK_SIZE) * NUM_LAYERS + layer) * 2
    place = (head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + dim
    key = tl.load(k + token * k_token_stride + head * k_head_stride + dim, mask=inside)
    value = tl.load(v + token * v_token_stride + head * v_head_stride + dim, mask=inside)
    PLANE: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    tl.store(pool + plane * PLANE + place, key, mask=inside)
    tl.store(pool + (plane + 1) * PLANE + place, value, mask=inside)


@triton.jit
def copy_kernel(src, dst, pairs, WORDS: tl.constexpr, TILE: tl.constexpr):
    pair = tl.program_id(0)
    source = tl.load(pairs + 2 * pair).to(tl.int64)
    target = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = word < WORDS
    tl.store(dst + target * WORDS + word, tl.load(src + source * WORDS + word, mask=inside), mask=inside)


def write_kv(pool: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """As `reference.write_kv`; k and v may have any strides as long as head_dim is contiguous."""
    tokens, kv_heads, head_dim = k.shape
    if not tokens:
        return
    tile = min(triton.next_power_of_2(kv_heads * head_dim), 2048)
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    launch(
        write_kernel,
        (tokens, triton.cdiv(kv_heads * head_dim, tile)),
        (pool, k, v, slots, layer, *strides),
        (pool.shape[1], kv_heads, pool.shape[4], head_dim, tile),
    )


def copy_blocks(src_pool: Tensor, dst_pool: Tensor, pairs: Tensor) -> None:
    """As `reference.copy_blocks`, in one launch.

    `pairs` is on the device; a pool may be pinned host memory. The rows of one call run in no order, so no
    block may be a source and a destination at once. Raises ValueError when the pools' blocks differ.
    """
    if src_pool.shape[1:] != dst_pool.shape[1:] or src_pool.dtype != dst_pool.dtype:
        raise ValueError(
            f"blocks differ: {src_pool.shape[1:]} {src_pool.dtype}, {dst_pool.shape[1:]} {dst_pool.dtype}"
        )
    if not len(pairs):
        return
    src, dst = (pool.view(len(pool), -1).view(torch.int64) for pool in (src_pool, dst_pool))
    words, tile = src.shape[1], 4096
    grid = (len(pairs), triton.cdiv(words, tile))
    launch(copy_kernel, grid, (src, dst, pairs.contiguous()), (words, tile), num_warps=8)
