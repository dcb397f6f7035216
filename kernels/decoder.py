"""The decoder layers of a Llama-like model in one compiled call, and linear layers over weights packed for it.

`cpu_decoder.cpp` and `cpu_gemm.h` hold the computation. Weights are packed in panels of 32 outputs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.kernels import cpu
from plait.kernels.attention import PagedAttention

PANEL = 32
PHASES = ("norm", "product", "rotary", "attention")


def fits(dtype: torch.dtype, *widths: int) -> bool:
    """Whether the compiled products know this dtype, on this processor, and these input and output widths."""
    return (
        dtype in (torch.float32, torch.bfloat16)
        and cpu.library() is not None
        and all(w % 16 == 0 for w in widths)
    )


def pack(weight: Tensor) -> Tensor:
    """[out, in] to panels: float32 [out/32, in, 32], bfloat16 [out/32, in/2, 32, 2]; the last one is padded."""
    weight = functional.pad(weight.detach(), (0, 0, 0, -weight.shape[0] % PANEL))
    if weight.dtype == torch.bfloat16:
        return weight.view(-1, PANEL, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()
    return weight.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up weights [I, in] so that each panel holds 16 gates and the 16 ups that belong to them."""
    width = gate.shape[1]
    return torch.stack([gate.view(-1, 16, width), up.view(-1, 16, width)], 1).view(-1, width)


class PanelLinear(nn.Module):
    """y = W x in float32, for x [..., in] and W [out, in] of one dtype and without bias: made for output heads."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = pack(weight)
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        out = torch.empty(rows.shape[0], self.out_features)
        begun = perf_counter()
        cpu.linear(rows, self.packed, out)
        self.seconds += perf_counter() - begun
        return out.view(*x.shape[:-1], self.out_features)

    def spent(self) -> dict[str, float]:
        """Seconds so far, by phase."""
        return {"product": self.seconds}


@dataclass(slots=True)
class LayerWeights:
    """What one layer computes with, as in the model: [out, in] matrices and vectors."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    norm: Tensor
    mlp_norm: Tensor
    qkv_bias: Tensor | None
    window: int


class Decoder(nn.Module):
    """Stands in for all of a model's decoder layers. Keeps the residual stream in float32.

    Takes packed copies layer by layer from `add`, so that the model's own weights can be freed in between.
    """

    def __init__(self, eps: float, scale: float):
        super().__init__()
        self.eps, self.scale = eps, scale
        self.kept: list[Tensor] = []
        self.seconds = torch.zeros(len(PHASES), dtype=torch.float64)
        self.layers: list[cpu.Layer] = []

    def spent(self) -> dict[str, float]:
        """Seconds so far, by phase."""
        return dict(zip(PHASES, self.seconds.tolist(), strict=True))

    def add(self, w: LayerWeights) -> None:
        self.hidden, self.inner = w.q.shape[1], w.gate.shape[0]
        packed = [pack(torch.cat([w.q, w.k, w.v])), pack(w.out), pack(interleave(w.gate, w.up)), pack(w.down)]
        vectors = [
            None if x is None else x.detach().float().contiguous() for x in (w.qkv_bias, w.norm, w.mlp_norm)
        ]
        self.kept += [x for x in (*packed, *vectors) if x is not None]
        pointers = [None if x is None else x.data_ptr() for x in (*packed, *vectors)]
        self.layers.append(cpu.Layer(*pointers, w.window))

    def seal(self) -> None:
        """All layers are there."""
        array = (cpu.Layer * len(self.layers))(*self.layers)
        self.described = cpu.Decoder(
            ctypes.cast(array, ctypes.c_void_p),
            self.seconds.data_ptr(),
            len(self.layers),
            self.hidden,
            self.inner,
            torch.get_num_threads(),
            self.eps,
            self.scale,
        )
        self.array = array

    def forward(
        self,
        hidden: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        plait: PagedAttention,
        **_: object,
    ) -> Tensor:
        """hidden [1, T, H] of the model's dtype; cos and sin [1, T, D] in float32. Gives [1, T, H]."""
        stream = hidden.float()
        cpu.forward(self.described, plait.iteration, stream, *position_embeddings)
        return stream.to(hidden.dtype)
