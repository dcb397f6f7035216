"""What one iteration of the engine tells the kernels about its sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Batch:
    """One ragged iteration: the sequences' chunks laid end to end on one flat row of T tokens.

    `pool` is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous, index 0 of the
    third dimension for keys and 1 for values: all layers of a block are adjacent. Token i of a chunk of n,
    of a sequence of length L, is at position L - n + i.
    """

    query_start: Tensor
    """[S + 1] int32: the row where each sequence's chunk begins; the last entry is T."""
    seq_lens: Tensor
    """[S] int32: tokens of each sequence in the cache after this iteration, its chunk included."""
    block_tables: Tensor
    """[S, max_blocks] int32; entries past a sequence's last block are never read."""
    slots: Tensor
    """[T] int64: block * block_size + offset where each token's key and value go; -1 for nowhere."""
    pool: Tensor
    max_query: int
    """The longest chunk, in tokens."""
    max_seq: int
    """The largest of `seq_lens`."""
    num_decodes: int
    """The first `num_decodes` sequences have a chunk of one token."""
    plans: dict[int | None, tuple[Tensor, ...]] = field(default_factory=dict)
    """How the Triton kernels cut the decodes, by sliding window; made by the first layer that has it."""
