"""Decoder layers of a Llama-like model on a GPU in nine or ten launches each instead of about forty.

QKV and gate/up are one product each; norm with the addition before it, rotary embedding with the cache write, and
SiLU with its product are one kernel each (`kernels/triton_layer.py`). Embedding, rotary frequencies and output matrix
stay transformers' own. Values are rounded where transformers rounds them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from plait.engine.fastpath import is_llama_like, window_of
from plait.kernels import reference
from plait.kernels.attention import PagedAttention

log = logging.getLogger(__name__)

LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


@dataclass(slots=True)
class Weights:
    """Of one layer; matrices are [out, in]."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    window: int | None


class FusedLayers(nn.Module):
    """Stands in for all decoder layers of a model."""

    def __init__(self, eps: float, scale: float):
        super().__init__()
        self.eps, self.scale = eps, scale
        self.weights: list[Weights] = []

    def forward(
        self,
        hidden: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        plait: PagedAttention,
        **_: object,
    ) -> Tensor:
        """hidden [1, T, H], which is changed; cos and sin [1, T, D] of the same dtype. Gives [1, T, H]."""
        parts = parts_for(plait.backend)
        stream = hidden[0]
        cos, sin = (x[0].contiguous() for x in position_embeddings)
        added = None
        for layer, w in enumerate(self.weights):
            normed = parts.norm(stream, w.norm, self.eps, added)
            qkv = linear(normed, w.qkv, w.qkv_bias)
            q = parts.rotate_and_write(
                qkv, plait.pool, layer, plait.batch.slots, cos, sin, w.head_norms, self.eps
            )
            attended = plait.attend(layer, q, scale=self.scale, window=w.window)
            normed = parts.norm(stream, w.mlp_norm, self.eps, linear(attended.flatten(1), w.out))
            added = linear(parts.silu_mul(linear(normed, w.gate_up)), w.down)
        return stream.add_(added)[None]


class FusedNorm(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.view(-1, hidden.shape[-1])
        return (
            parts_for("triton" if rows.is_cuda else "torch").norm(rows, self.weight, self.eps).view_as(hidden)
        )


def parts_for(backend: str):
    """The module with the parts of a layer: Triton's on a GPU, where the reference would be many launches."""
    if backend == "triton":
        from plait.kernels import triton_layer

        return triton_layer
    return reference


@torch.no_grad()
def fuse(model: nn.Module) -> bool:
    """Change a model in place, if its layers are known; its original weights are freed layer by layer."""
    base = model.base_model
    layers, rotary = getattr(base, "layers", None), getattr(base, "rotary_emb", None)
    if why := unknown(layers, rotary, next(model.parameters()).dtype):
        log.warning("layers are not fused, transformers' own run, slower: %s", why)
        return False
    first = layers[0]
    fused = FusedLayers(first.input_layernorm.variance_epsilon, first.self_attn.scaling)
    for i in range(len(layers)):
        fused.weights.append(weights_of(layers[i]))
        layers[i] = nn.Identity()
    base.layers = nn.ModuleList([fused])
    base.norm = FusedNorm(base.norm)
    return True


def unknown(layers: nn.ModuleList | None, rotary: nn.Module | None, dtype: torch.dtype) -> str | None:
    """Why `FusedLayers` does not compute what these layers do; None when it does."""
    if not layers or rotary is None:
        return "the model has no `layers` and `rotary_emb`"
    for layer in layers:
        name = type(layer).__name__
        if name not in LAYERS or not is_llama_like(layer):
            return f"{name} is not known, or has a part that is not"
        if {p.dtype for p in layer.parameters()} != {dtype}:
            return f"{name} has parameters of several types"
        if 2 * len(rotary.inv_freq) != layer.self_attn.head_dim:
            return f"{name} turns a part of each head only"
        if layer.self_attn.head_dim % 16:
            return f"{name} has heads of {layer.self_attn.head_dim} elements, which is no multiple of 16"
    return None


def weights_of(layer: nn.Module) -> Weights:
    a, mlp = layer.self_attn, layer.mlp
    projections = (a.q_proj, a.k_proj, a.v_proj)
    has_norms = hasattr(a, "q_norm")
    return Weights(
        norm=layer.input_layernorm.weight,
        qkv=torch.cat([x.weight for x in projections]),
        qkv_bias=None if a.q_proj.bias is None else torch.cat([x.bias for x in projections]),
        head_norms=(a.q_norm.weight, a.k_norm.weight) if has_norms else None,
        out=a.o_proj.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
        window=window_of(a),
    )
