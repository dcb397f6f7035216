"""The one door to the KV pool: writes and reads it with the fastest kernels that its device has."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.kernels import cpu, reference
from plait.kernels.batch import Batch


class PagedAttention:
    """Cache write and attention over one pool. `begin` names the iteration; then each layer writes and attends.

    On a GPU Triton, on the CPU the compiled kernels, elsewhere (or with `plain`) the torch reference. A pool is
    to be read by the backend that wrote it: the CPU kernels keep K transposed.
    """

    def __init__(self, pool: Tensor, q_heads: int, *, plain: bool = False):
        self.pool = pool
        self.q_heads = q_heads
        self.batch: Batch | None = None
        if not plain and pool.device.type == "cuda":
            self.backend = "triton"
        elif not plain and cpu.takes(pool, q_heads):
            self.backend = "cpu"
        else:
            self.backend = "torch"

    def begin(self, batch: Batch) -> None:
        self.batch = batch
        if self.backend == "cpu":
            self.iteration = cpu.iteration(batch, self.q_heads)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v [T, Hkv, D], the last dimension contiguous."""
        if self.backend == "cpu":
            cpu.write_kv(self.iteration, layer, k, v)
        elif self.backend == "triton":
            from plait.kernels import triton_cache

            triton_cache.write_kv(self.pool, layer, k, v, self.batch.slots)
        else:
            reference.write_kv(self.pool, layer, k, v, self.batch.slots)

    def attend(
        self,
        layer: int,
        q: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, Hq, D] against everything written for its sequences; gives [T, Hq, D]."""
        if self.backend == "cpu":
            sinks = None if sinks is None else sinks.detach().to(torch.float32).contiguous()
            return cpu.attention(self.iteration, layer, q, scale, window, softcap, sinks)
        if self.backend == "triton":
            from plait.kernels import triton_attention

            attend = triton_attention.paged_attention
        else:
            attend = reference.paged_attention
        return attend(q, self.batch, layer, scale=scale, window=window, softcap=softcap, sinks=sinks)
