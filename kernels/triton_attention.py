"""Paged attention for a ragged batch in one Triton kernel: prefill chunks and decodes.

The online softmax over tiles of keys, with the rescaling deferred, is FlashAttention-2 (Dao 2023,
arXiv:2307.08691); keys and values come through block tables as in PagedAttention (Kwon et al. 2023,
arXiv:2309.06180). The query heads that share a key head are packed with the chunk's tokens into the rows of
one tile, so that grouped heads read each key once. Decodes are cut along the keys into pieces of about equal work
and combined by a second kernel as in Flash-Decoding (Dao, Haziza, Massa, Sizov 2023,
https://pytorch.org/blog/flash-decoding/). How they are cut the device decides, once an iteration and from the lengths
that lie in its memory, so that one launch geometry, and so one CUDA graph, is right for all lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.batch import Batch
from plait.kernels.triton_config import Cut, Launch, cut_for, device_of, launch_for
from plait.kernels.triton_launch import launch as launch_kernel

# Finite, so that a row with no visible key in its first tiles stays free of NaN: what it gathered there is
# scaled by exp2(LOW - top) = 0 as soon as a visible key comes.
LOW = tl.constexpr(-1.0e30)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tiles(
    q,
    acc,
    total,
    top,
    begin,
    end,
    lowest,
    length,
    position,
    kv,
    table,
    scale,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STRIDE: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Online softmax over the key tiles `begin` to `end - 1`; MASKED tiles have keys some rows do not see."""
    dim = tl.arange(0, HEAD_PAD)
    key = lowest + begin * TILE_N + tl.arange(0, TILE_N)
    # Block numbers are fetched one tile ahead, so that the loads of keys and values can be pipelined.
    block = tl.load(table + key // BLOCK_SIZE, mask=key < length, other=0)
    for _ in range(begin, end):
        present = key < length
        place = block.to(tl.int64) * STRIDE + (key % BLOCK_SIZE) * HEAD_DIM
        k_at = kv + place[None, :] + dim[:, None]
        v_at = kv + PLANE + place[:, None] + dim[None, :]
        following = key + TILE_N
        block = tl.load(table + following // BLOCK_SIZE, mask=following < length, other=0)
        if MASKED and HEAD_DIM == HEAD_PAD:
            k = tl.load(k_at, mask=present[None, :], other=0.0)
            v = tl.load(v_at, mask=present[:, None], other=0.0)
        elif MASKED:
            k = tl.load(k_at, mask=present[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_at, mask=present[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM == HEAD_PAD:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=(dim < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)

        scores = tl.dot(q, k, input_precision="ieee")
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), right at both ends
            growth = tl.exp2(scores * (scale * (2 * LOG2E / SOFTCAP)))
            scores = (1 - 2 / (growth + 1)) * (SOFTCAP * LOG2E)
        else:
            scores *= scale * LOG2E
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen &= key[None, :] > position[:, None] - WINDOW
            scores = tl.where(seen & present[None, :], scores, LOW)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
        key = following
    return acc, total, top


@triton.jit
def _find_sequence(query_start, first_seq, num_seqs, block, TOKENS: tl.constexpr):
    """The sequence that holds query block `block`: sequence i begins at (rows before it) // TOKENS + i."""
    base = tl.load(query_start + first_seq)
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(query_start + first_seq + middle) - base) // TOKENS + middle <= block:
            low = middle
        else:
            high = middle
    start = (tl.load(query_start + first_seq + low) - base) // TOKENS + low
    return first_seq + low, block - start


@triton.jit
def _key_tiles(seq_lens, seq, num_seqs, WINDOW: tl.constexpr, TILE_N: tl.constexpr):
    """Tiles of keys that each of some decodes reads; none for one that is not there."""
    keys = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0)
    if WINDOW > 0:
        keys = tl.minimum(keys, WINDOW)
    return tl.cdiv(keys, TILE_N)


@triton.jit(do_not_specialize=["num_seqs", "wanted", "least"])
def plan_kernel(
    items,
    firsts,
    share,
    seq_lens,
    num_seqs,
    wanted,
    least,
    WINDOW: tl.constexpr,
    TILE_N: tl.constexpr,
    LANES: tl.constexpr,
):
    """Cuts decodes into items of `share` tiles of keys; every decode has one at least.

    items[i] is the sequence of item i, and firsts[s] the first item of sequence s; firsts[num_seqs] is their number,
    at most num_seqs + wanted.
    """
    lane = tl.arange(0, LANES)
    total = 0
    for start in range(0, num_seqs, LANES):
        total += tl.sum(_key_tiles(seq_lens, start + lane, num_seqs, WINDOW, TILE_N), 0)
    size = tl.maximum(tl.cdiv(total, wanted), least)
    tl.store(share, size)
    before = 0
    for start in range(0, num_seqs, LANES):
        seq = start + lane
        there = seq < num_seqs
        tiles = _key_tiles(seq_lens, seq, num_seqs, WINDOW, TILE_N)
        count = tl.where(there, tl.maximum(tl.cdiv(tiles, size), 1), 0)
        first = before + tl.cumsum(count, 0) - count
        tl.store(firsts + seq, first, mask=there)
        for i in range(tl.max(count, 0)):
            tl.store(items + first + i, seq, mask=i < count)
        before += tl.sum(count, 0)
    tl.store(firsts + num_seqs, before)


@triton.jit(do_not_specialize=["layer", "first_seq", "num_seqs", "table_stride"])
def attention_kernel(
    out,
    q,
    pool,
    query_start,
    seq_lens,
    block_tables,
    sinks,
    partial,
    stats,
    items,
    firsts,
    share,
    scale,
    layer,
    first_seq,
    num_seqs,
    table_stride,
    q_token_stride,
    q_head_stride,
    DECODE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """One tile of queries against all the keys it sees, or with DECODE against those of one item of the plan.

    Grid: (query blocks or items, kv heads). With DECODE a tile has one token, else TILE_M // GROUP tokens of one
    sequence. Row r of the tile is token r // GROUP, query head r % GROUP of the kv head.
    """
    PLANE: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    STRIDE: tl.constexpr = NUM_LAYERS * 2 * PLANE
    TOKENS: tl.constexpr = 1 if DECODE else TILE_M // GROUP
    kv_head = tl.program_id(1)
    if DECODE:
        item = tl.program_id(0)
        if item >= tl.load(firsts + num_seqs):
            return
        # Decodes come first: sequence i is token i.
        seq = tl.load(items + item)
        first_item = tl.load(firsts + seq)
        alone = tl.load(firsts + seq + 1) == first_item + 1
        first_token = 0
        start = seq
        chunk = 1
    else:
        # The last blocks of a long chunk see the most keys: they start first.
        seq, index = _find_sequence(
            query_start, first_seq, num_seqs, tl.num_programs(0) - 1 - tl.program_id(0), TOKENS
        )
        first_token = index * TOKENS
        start = tl.load(query_start + seq)
        chunk = tl.load(query_start + seq + 1) - start
        if first_token >= chunk:
            return
    length = tl.load(seq_lens + seq)

    row = tl.arange(0, TILE_M)
    dim = tl.arange(0, HEAD_PAD)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    used = (row < TOKENS * GROUP) & (token < chunk)
    inside = used[:, None] & (dim < HEAD_DIM)[None, :]
    at = (
        q
        + (start + token).to(tl.int64)[:, None] * q_token_stride
        + head[:, None] * q_head_stride
        + dim[None, :]
    )
    queries = tl.load(at, mask=inside, other=0.0)
    position = length - chunk + token

    acc = tl.zeros([TILE_M, HEAD_PAD], dtype=tl.float32)
    top = tl.full([TILE_M], LOW, dtype=tl.float32)
    total = tl.zeros([TILE_M], dtype=tl.float32)
    if sinks is not None:
        # One more logit without a value, counted once, by a sequence's first item.
        counted = item == first_item if DECODE else True
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2E
        top = tl.where(counted, sink, top)
        total = tl.where(counted, 1.0, total)

    first_position = length - chunk + first_token
    last_position = length - chunk + tl.minimum(first_token + TOKENS, chunk) - 1
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(0, first_position - WINDOW + 1)
    num_tiles = tl.cdiv(last_position + 1 - lowest, TILE_N)
    kv = pool + (layer.to(tl.int64) * (2 * KV_HEADS) + kv_head) * (BLOCK_SIZE * HEAD_DIM)
    table = block_tables + seq.to(tl.int64) * table_stride

    if DECODE:
        size = tl.load(share)
        begin = (item - first_item) * size
        acc, total, top = _tiles(
            queries, acc, total, top, begin, tl.minimum(begin + size, num_tiles), lowest, length, position,
            kv, table, scale, True, WINDOW, SOFTCAP, STRIDE, PLANE, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, TILE_N,
        )  # fmt: skip
    else:
        open_begin = 0
        if WINDOW > 0:
            open_begin = tl.minimum(
                tl.cdiv(tl.maximum(last_position - WINDOW + 1 - lowest, 0), TILE_N), num_tiles
            )
            acc, total, top = _tiles(
                queries, acc, total, top, 0, open_begin, lowest, length, position, kv,
                table, scale, True, WINDOW, SOFTCAP, STRIDE, PLANE, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, TILE_N,
            )  # fmt: skip
        open_end = tl.maximum((first_position + 1 - lowest) // TILE_N, open_begin)
        acc, total, top = _tiles(
            queries, acc, total, top, open_begin, open_end, lowest, length, position, kv,
            table, scale, False, WINDOW, SOFTCAP, STRIDE, PLANE, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, TILE_N,
        )  # fmt: skip
        acc, total, top = _tiles(
            queries, acc, total, top, open_end, num_tiles, lowest, length, position, kv,
            table, scale, True, WINDOW, SOFTCAP, STRIDE, PLANE, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, TILE_N,
        )  # fmt: skip

    # A sequence of length 0 (a padding row of a captured graph) gives zeros.
    mean = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
    target = (start + token).to(tl.int64) * (KV_HEADS * GROUP) + head
    if DECODE:
        tl.store(out + target[:, None] * HEAD_DIM + dim[None, :], mean, mask=inside & alone)
        if not alone:
            part = item.to(tl.int64) * (KV_HEADS * GROUP) + head
            tl.store(partial + part[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside)
            tl.store(stats + part * 2, top, mask=used)
            tl.store(stats + part * 2 + 1, total, mask=used)
    else:
        tl.store(out + target[:, None] * HEAD_DIM + dim[None, :], mean, mask=inside)


@triton.jit
def combine_kernel(
    out,
    partial,
    stats,
    firsts,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    LANES: tl.constexpr,
):
    """Joins the items of one decode, for one head: a softmax over their maxima weighs their sums."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(firsts + seq)
    count = tl.load(firsts + seq + 1) - first
    if count == 1:
        return
    dim = tl.arange(0, HEAD_PAD)
    lane = tl.arange(0, LANES)
    top = tl.full([1], LOW, dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    acc = tl.zeros([HEAD_PAD], dtype=tl.float32)
    for start in range(0, count, LANES):
        item = start + lane
        at = (first + item).to(tl.int64) * HEADS + head
        there = item < count
        tops = tl.load(stats + at * 2, mask=there, other=LOW)
        totals = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
        inside = there[:, None] & (dim < HEAD_DIM)[None, :]
        parts = tl.load(partial + at[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        weight = tl.exp2(tops - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(totals * weight, 0)
        acc = acc * shrink + tl.sum(parts * weight[:, None], 0)
        top = new_top
    joined = acc / tl.where(total > 0, total, 1.0)
    target = (seq.to(tl.int64) * HEADS + head) * HEAD_DIM
    tl.store(out + target + dim, joined.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def paged_attention(
    q: Tensor,
    batch: Batch,
    layer: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `reference.paged_attention`; rows of q past the last sequence are left undefined.

    q has the pool's type (bf16, fp16, fp32), else ValueError, and a head_dim of 16 to 256. Decodes and longer
    chunks are launched apart, each with tiles of its size. Nothing waits for the device.
    """
    if q.dtype != batch.pool.dtype:
        raise ValueError(f"queries are {q.dtype}, the cache is {batch.pool.dtype}")
    if q.stride(-1) != 1:
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    device = device_of(q.device)
    kv_heads, head_dim, group = batch.pool.shape[3], batch.pool.shape[5], q.shape[1] // batch.pool.shape[3]
    decodes = batch.num_decodes
    seqs = len(batch.seq_lens)
    if decodes:
        launch = launch_for(device, q.dtype, head_dim, group, decode=True)
        cut = cut_for(device, kv_heads, launch.tile_n)
        plan = _plan(batch, window, launch, cut)
        rows = (decodes + cut.wanted) * q.shape[1]
        partial = torch.empty(rows * head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows * 2, dtype=torch.float32, device=q.device)
        parts = (partial, stats, *plan)
        grid = (decodes + cut.wanted, kv_heads)
        _launch(launch, grid, out, q, batch, layer, scale, window, softcap, sinks, parts)
        keys = min(batch.max_seq, window) if window else batch.max_seq
        if keys > cut.least * launch.tile_n:
            launch_kernel(
                combine_kernel,
                (decodes, q.shape[1]),
                (out, partial, stats, plan[1]),
                (q.shape[1], head_dim, launch.head_pad, 16),
                num_warps=2,
            )
    if seqs > decodes:
        launch = launch_for(device, q.dtype, head_dim, group, decode=False)
        blocks = (len(q) - decodes) // (launch.tile_m // group) + seqs - decodes
        none = (None,) * 5
        _launch(launch, (blocks, kv_heads), out, q, batch, layer, scale, window, softcap, sinks, none)
    return out


def _plan(batch: Batch, window: int | None, launch: Launch, cut: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """What `plan_kernel` says, once an iteration for all layers of one window."""
    if window not in batch.plans:
        made = [
            torch.empty(size, dtype=torch.int32, device=batch.seq_lens.device)
            for size in (batch.num_decodes + cut.wanted, batch.num_decodes + 1, 1)
        ]
        arguments = (*made, batch.seq_lens, batch.num_decodes, cut.wanted, cut.least)
        launch_kernel(plan_kernel, (1,), arguments, (window or 0, launch.tile_n, 256))
        batch.plans[window] = tuple(made)
    return batch.plans[window]


def _launch(
    launch: Launch,
    grid: tuple[int, int],
    out: Tensor,
    q: Tensor,
    batch: Batch,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    parts: tuple[Tensor | None, ...],
) -> None:
    first = 0 if launch.decode else batch.num_decodes
    arguments = (
        out,
        q,
        batch.pool,
        batch.query_start,
        batch.seq_lens,
        batch.block_tables,
        sinks,
        *parts,
        float(scale),
        layer,
        first,
        batch.num_decodes if launch.decode else len(batch.seq_lens) - first,
        batch.block_tables.stride(0),
        q.stride(0),
        q.stride(1),
    )
    launch_kernel(
        attention_kernel,
        grid,
        arguments,
        launch.constants(batch.pool, q.shape[1], window, softcap),
        launch.num_warps,
        launch.num_stages,
    )
