"""Triton kernels for what lies between the matrix products of a Llama-like layer: norm, rotary embedding, SiLU.

Sums are made in float32 and rounded to the model's type wherever transformers rounds. RMSNorm is that of Zhang and
Sennrich (2019, arXiv:1910.07467), the rotary embedding that of Su et al. (2021, arXiv:2104.09864) with the halves of a
head for pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton_launch import launch


@triton.jit
def _times(a, b):
    """A product of two values of one type, rounded to it, as torch makes it."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


@triton.jit
def _plus(a, b):
    return (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)


@triton.jit
def _minus(a, b):
    return (a.to(tl.float32) - b.to(tl.float32)).to(a.dtype)


@triton.jit
def norm_kernel(out, stream, added, weight, eps, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """One row: stream += added, where there is one, and out = its norm."""
    start = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, PAD)
    inside = column < WIDTH
    x = tl.load(stream + start + column, mask=inside, other=0.0)
    if added is not None:
        x = _plus(x, tl.load(added + start + column, mask=inside, other=0.0))
        tl.store(stream + start + column, x, mask=inside)
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, 0) / WIDTH
    normed = (wide * tl.rsqrt(mean + eps)).to(x.dtype)
    tl.store(
        out + start + column,
        _times(normed, tl.load(weight + column, mask=inside, other=0.0)),
        mask=inside,
    )


@triton.jit
def silu_kernel(out, gate_up, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """A tile of one row: SiLU of the gates, times the ups that lie behind them."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * WIDTH + column, _times(active, up), mask=inside)


@triton.jit
def _head_norm(low, high, weight, dim, inside, eps, HALF: tl.constexpr):
    """RMSNorm of each row of a tile, whose halves are given apart."""
    low32, high32 = low.to(tl.float32), high.to(tl.float32)
    mean = (tl.sum(low32 * low32, 1) + tl.sum(high32 * high32, 1)) / (2 * HALF)
    scale = tl.rsqrt(mean + eps)[:, None]
    low = _times((low32 * scale).to(low.dtype), tl.load(weight + dim, mask=inside, other=0.0)[None, :])
    high = _times(
        (high32 * scale).to(low.dtype), tl.load(weight + HALF + dim, mask=inside, other=0.0)[None, :]
    )
    return low, high


@triton.jit(do_not_specialize=["layer"])
def rotary_kernel(
    qkv,
    pool,
    cos,
    sin,
    slots,
    q_norm,
    k_norm,
    eps,
    layer,
    NUM_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """One token and one kv head: its queries turn in place, its key turns on the way into the cache, its value follows.

    A tile has the queries of the group in its rows and, in row GROUP, the key.
    """
    HEAD_DIM: tl.constexpr = 2 * HALF
    PLANE: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HALF_PAD)
    in_head = dim < HALF
    start = qkv + token * ((GROUP + 2) * KV_HEADS * HEAD_DIM)
    head = tl.where(row < GROUP, kv_head * GROUP + row, KV_HEADS * GROUP + kv_head)
    at = head[:, None] * HEAD_DIM + dim[None, :]
    inside = (row <= GROUP)[:, None] & in_head[None, :]
    low = tl.load(start + at, mask=inside, other=0.0)
    high = tl.load(start + at + HALF, mask=inside, other=0.0)
    if q_norm is not None:
        q_low, q_high = _head_norm(low, high, q_norm, dim, in_head, eps, HALF)
        k_low, k_high = _head_norm(low, high, k_norm, dim, in_head, eps, HALF)
        is_query = (row < GROUP)[:, None]
        low, high = tl.where(is_query, q_low, k_low), tl.where(is_query, q_high, k_high)
    # Both halves of a row of cos, and of sin, are the same.
    c = tl.load(cos + token * HEAD_DIM + dim, mask=in_head, other=0.0)[None, :]
    s = tl.load(sin + token * HEAD_DIM + dim, mask=in_head, other=0.0)[None, :]
    turned_low = _minus(_times(low, c), _times(high, s))
    turned_high = _plus(_times(high, c), _times(low, s))
    queries = inside & (row < GROUP)[:, None]
    tl.store(start + at, turned_low, mask=queries)
    tl.store(start + at + HALF, turned_high, mask=queries)

    slot = tl.load(slots + token)
    if slot >= 0:
        plane = ((slot // BLOCK_SIZE) * NUM_LAYERS + layer) * (2 * PLANE)
        place = pool + plane + (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
        # Row GROUP of the tile holds the key; the other rows are masked.
        keys = (row == GROUP)[:, None] & in_head[None, :]
        to_key = place + row[:, None] * 0 + dim[None, :]
        tl.store(to_key, turned_low, mask=keys)
        tl.store(to_key + HALF, turned_high, mask=keys)
        value = start + ((GROUP + 1) * KV_HEADS + kv_head) * HEAD_DIM + dim
        tl.store(place + PLANE + dim, tl.load(value, mask=in_head), mask=in_head)
        tl.store(place + PLANE + HALF + dim, tl.load(value + HALF, mask=in_head), mask=in_head)


def norm(stream: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> Tensor:
    """As `reference.norm`."""
    rows, width = stream.shape
    out = torch.empty_like(stream)
    pad = triton.next_power_of_2(width)
    launch(
        norm_kernel,
        (rows,),
        (out, stream, added, weight, float(eps)),
        (width, pad),
        num_warps=min(16, max(1, pad // 512)),
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `reference.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    tile = min(triton.next_power_of_2(width), 1024)
    launch(silu_kernel, (rows, triton.cdiv(width, tile)), (out, gate_up), (width, tile))
    return out


def rotate_and_write(
    qkv: Tensor,
    pool: Tensor,
    layer: int,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """As `reference.rotate_and_write`."""
    tokens = len(qkv)
    _, num_layers, _, kv_heads, block_size, dim = pool.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    group = heads // kv_heads
    pads = (triton.next_power_of_2(group + 1), triton.next_power_of_2(dim // 2))
    launch(
        rotary_kernel,
        (tokens, kv_heads),
        (qkv, pool, cos, sin, slots, *(norms or (None, None)), float(eps), layer),
        (num_layers, kv_heads, group, pads[0], block_size, dim // 2, pads[1]),
        num_warps=4 if group > 4 else 2,
    )
    return qkv[:, : heads * dim].view(tokens, heads, dim)
