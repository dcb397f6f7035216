"""Paged attention, cache write, block copy and parts of a layer in plain torch: what fast kernels are compared with.

Runs on any device and in any floating-point type; slow, since it goes through the sequences one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from plait.kernels.batch import Batch


def write_kv(pool: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Put keys and values `[T, num_kv_heads, head_dim]` of one layer into their slots; -1 skips a token."""
    block_size = pool.shape[4]
    kept = slots >= 0
    slots = slots[kept]
    block, offset = slots // block_size, slots % block_size
    pool[block, layer, 0, :, offset] = k[kept].to(pool.dtype)
    pool[block, layer, 1, :, offset] = v[kept].to(pool.dtype)


def copy_blocks(src_pool: Tensor, dst_pool: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks, all layers: `pairs` `[N, 2]` holds (source block, destination block).

    The pools may be the same tensor as long as no block is both a source and a destination.
    """
    dst_pool[pairs[:, 1].to(dst_pool.device)] = src_pool[pairs[:, 0].to(src_pool.device)].to(dst_pool.device)


def norm(stream: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> Tensor:
    """RMSNorm of each row of stream [T, H], after `added` [T, H] was added to it in place."""
    if added is not None:
        stream += added
    wide = stream.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(stream.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of each row, times the second: [T, 2 I] to [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


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
    """Turn queries and keys by their positions and put keys and values into their slots, as `write_kv` does.

    qkv [T, (Hq + 2 Hkv) D] holds the heads of queries, keys and values in this order; cos and sin [T, D] have equal
    halves. `norms` are weights [D] of an RMSNorm over each head of the queries and of the keys, before the turning.
    Gives the queries [T, Hq, D]; they may lie where they lay in qkv.
    """
    kv_heads, dim = pool.shape[3], pool.shape[5]
    heads = qkv.view(len(qkv), -1, dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = (norm(x, weight, eps) for x, weight in zip((q, k), norms, strict=True))
    q, k = (x * cos[:, None] + _half_turned(x) * sin[:, None] for x in (q, k))
    write_kv(pool, layer, k, v, slots)
    return q


def _half_turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([-high, low], -1)


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
    """Causal attention of a ragged batch over the paged cache, in fp32; q is `[T, num_heads, head_dim]`.

    With `window` a query at position p sees the keys p - window + 1 to p. `softcap` bounds the scaled scores
    to (-softcap, softcap) by tanh, as in Gemma 2. `sinks` `[num_heads]` adds one logit per head to the
    softmax's denominator, as in GPT-OSS. Rows of q past the last sequence give zeros.
    """
    out = torch.zeros_like(q)
    starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
    for seq, length in enumerate(lengths):
        chunk = q[starts[seq] : starts[seq + 1]]
        if len(chunk):
            first = 0 if window is None else max(0, length - len(chunk) - window + 1)
            keys, values = _gather(batch, layer, seq, first, length)
            result = _attend(chunk, keys, values, scale, window, softcap, sinks)
            out[starts[seq] : starts[seq + 1]] = result.to(q.dtype)
    return out


def _gather(batch: Batch, layer: int, seq: int, first: int, length: int) -> tuple[Tensor, Tensor]:
    """The sequence's keys and values at positions first to length - 1, each `[num_kv_heads, n, head_dim]`.

    Blocks that lie wholly before `first` are not read: under a sliding window they may have been freed.
    """
    block_size = batch.pool.shape[4]
    skipped = first // block_size
    table = batch.block_tables[seq, skipped : -(-length // block_size)].long()
    kv = batch.pool[table, layer].movedim(0, 2).flatten(2, 3)
    kv = kv[:, :, first - skipped * block_size : length - skipped * block_size]
    return kv[0], kv[1]


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    tokens, heads, _ = q.shape
    kv_heads, length, _ = keys.shape
    acc = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(acc).view(tokens, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("tkgd,ksd->kgts", grouped, keys.to(acc)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    key = torch.arange(length, device=q.device)
    position = torch.arange(length - tokens, length, device=q.device)[:, None]
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        logit = sinks.to(acc).view(kv_heads, -1, 1, 1).expand(-1, -1, tokens, 1)
        weights = torch.cat([scores, logit], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("kgts,ksd->tkgd", weights, values.to(acc)).reshape(tokens, heads, -1)
