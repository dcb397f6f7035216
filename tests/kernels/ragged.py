"""Ragged batches over a scattered cache, for comparing attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.kernels import reference
from plait.kernels.batch import Batch


@dataclass(frozen=True)
class Layout:
    chunks: tuple[tuple[int, int], ...]
    """(tokens of this iteration, tokens in the cache with them) of each sequence, decodes first."""
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    seed: int = 0


@dataclass
class Case:
    batch: Batch
    layer: int
    q: Tensor
    keys: list[Tensor]
    """Of each sequence, all positions in order."""
    values: list[Tensor]
    options: dict

    def run(self, attention) -> Tensor:
        return attention(self.q, self.batch, self.layer, **self.options)


def build(layout: Layout, device: str = "cpu") -> Case:
    """A case whose blocks lie in random order. What must not be read is NaN: free blocks, slots past the end
    of a sequence, other layers, and the blocks before the window, which the tables no longer name.
    """
    draw = torch.Generator().manual_seed(layout.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(layout.dtype)

    size = layout.block_size
    needed = [-(-length // size) for _, length in layout.chunks]
    order = torch.randperm(sum(needed), generator=draw) + 1
    tables = torch.zeros(len(needed), max(needed) + 1, dtype=torch.int32)
    pool = torch.full(
        (sum(needed) + 1, 3, 2, layout.kv_heads, size, layout.head_dim), torch.nan, dtype=layout.dtype
    )
    layer = 1
    keys, values, slots = [], [], []
    for seq, ((chunk, length), blocks) in enumerate(zip(layout.chunks, order.split(needed), strict=True)):
        position = torch.arange(length)
        slot = blocks[position // size] * size + position % size
        keys.append(normal(length, layout.kv_heads, layout.head_dim))
        values.append(normal(length, layout.kv_heads, layout.head_dim))
        first = max(0, length - chunk - layout.window + 1) // size if layout.window else 0
        reference.write_kv(
            pool, layer, keys[-1][first * size :], values[-1][first * size :], slot[first * size :]
        )
        tables[seq, first : len(blocks)] = blocks[first:]
        slots.append(slot[length - chunk :])
    sizes = torch.tensor([0] + [chunk for chunk, _ in layout.chunks])
    batch = Batch(
        query_start=sizes.cumsum(0).int().to(device),
        seq_lens=torch.tensor([length for _, length in layout.chunks], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slots=torch.cat(slots).to(device),
        pool=pool.to(device),
        max_query=int(sizes.max()),
        max_seq=max(length for _, length in layout.chunks),
        num_decodes=next((i for i, (n, _) in enumerate(layout.chunks) if n != 1), len(layout.chunks)),
    )
    # The layout in which transformers hands queries over: heads before tokens.
    q = normal(layout.heads, int(sizes.sum()), layout.head_dim).transpose(0, 1).to(device)
    options = {"scale": layout.head_dim**-0.5, "window": layout.window, "softcap": layout.softcap}
    options["sinks"] = normal(layout.heads).to(device) if layout.sinks else None
    return Case(batch, layer, q, keys, values, options)
