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


@dataclass(slots=True)
class Panels:
    """Weights [out, in] as the products read them: in panels of 32 outputs, the last one padded.

    float32 lies as [out/32, in, 32], bfloat16 as [out/32, in/2, 32, 2]; int8 as the dtype it is multiplied in, with
    float32 `scales`, one of each output.
    """

    weights: Tensor
    scales: Tensor | None

    @property
    def pointers(self) -> cpu.Packed:
        return cpu.Packed(self.weights.data_ptr(), None if self.scales is None else self.scales.data_ptr())


def pack(weight: Tensor, int8: bool = False) -> Panels:
    """With `int8` rounded to 8 bits, symmetrically: each output's largest weight becomes 127 of its scale."""
    paired = weight.dtype == torch.bfloat16
    weight = functional.pad(weight.detach(), (0, 0, 0, -weight.shape[0] % PANEL))
    scales = None
    if int8:
        scales = weight.abs().amax(1).float().clamp(min=1e-12) / 127
        weight = (weight.float() / scales[:, None]).round().to(torch.int8)
    width = weight.shape[1]
    weight = weight.view(-1, PANEL, width // 2, 2) if paired else weight.view(-1, PANEL, width)
    return Panels(weight.transpose(1, 2).contiguous(), scales)


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up weights [I, in] so that each panel holds 16 gates and the 16 ups that belong to them."""
    width = gate.shape[1]
    return torch.stack([gate.view(-1, 16, width), up.view(-1, 16, width)], 1).view(-1, width)


class PanelLinear(nn.Module):
    """y = W x + b, for x [..., in] and W [out, in] of one dtype, in float32 or the dtype that is named."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        int8: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.panels = pack(weight, int8)
        self.bias = None if bias is None else bias.detach().float()
        self.dtype = dtype
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        out = torch.empty(rows.shape[0], self.out_features)
        begun = perf_counter()
        cpu.linear(rows, self.panels.pointers, out)
        self.seconds += perf_counter() - begun
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features).to(self.dtype)

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

    def __init__(self, eps: float, scale: float, int8: bool = False):
        super().__init__()
        self.eps, self.scale, self.int8 = eps, scale, int8
        self.kept: list[Panels | Tensor] = []
        self.seconds = torch.zeros(len(PHASES), dtype=torch.float64)
        self.layers: list[cpu.Layer] = []

    def spent(self) -> dict[str, float]:
        """Seconds so far, by phase."""
        return dict(zip(PHASES, self.seconds.tolist(), strict=True))

    def add(self, w: LayerWeights) -> None:
        self.hidden, self.inner = w.q.shape[1], w.gate.shape[0]
        matrices = (torch.cat([w.q, w.k, w.v]), w.out, interleave(w.gate, w.up), w.down)
        panels = [pack(x, self.int8) for x in matrices]
        vectors = [
            None if x is None else x.detach().to(torch.float32, copy=True).contiguous()
            for x in (w.qkv_bias, w.norm, w.mlp_norm)
        ]
        self.kept += [*panels, *(x for x in vectors if x is not None)]
        pointers = [None if x is None else x.data_ptr() for x in vectors]
        self.layers.append(cpu.Layer(*(p.pointers for p in panels), *pointers, w.window))

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
        self.run(stream, position_embeddings, plait)
        return stream.to(hidden.dtype)

    def run(self, stream: Tensor, places: tuple[Tensor, Tensor], attention: PagedAttention) -> None:
        """Take the residual stream [1, T, H], in float32, through all layers in place."""
        cpu.forward(self.described, attention.iteration, stream, *places)
