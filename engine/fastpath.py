"""Faster parts put in place of a transformers model's own, where their structure is known.

Decoder layers of the Llama kind become one `FastLayer` on the CPU: fused and packed weights, compiled norms,
rotary embedding and activation. Any other linear layer gets packed weights. Nothing else changes: embedding,
rotary frequencies, final norm, logit scaling and whatever else a model does stay transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plait.kernels import cpu
from plait.kernels.attention import PagedAttention
from plait.kernels.linear import PackedLinear, can_pack, fuse

LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm")


class FastNorm(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return cpu.rms_norm(x.view(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)


class FloatRotary(nn.Module):
    """The model's rotary embedding in float32, whatever the dtype of the model."""

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(x[..., :1].float(), position_ids=position_ids, **kwargs)
        return cos.contiguous(), sin.contiguous()


class FastLayer(nn.Module):
    """A pre-norm decoder layer: RMSNorm, rotary attention, RMSNorm, SiLU-gated MLP."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index = attention.layer_idx
        self.dim = attention.head_dim
        self.q_width = attention.q_proj.out_features
        self.scale = attention.scaling
        self.window = window_of(attention)
        self.qkv = fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = PackedLinear(attention.o_proj.weight, attention.o_proj.bias)
        self.gate_up = fuse(mlp.gate_proj, mlp.up_proj)
        self.down = PackedLinear(mlp.down_proj.weight, mlp.down_proj.bias)
        self.norm, self.mlp_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.eps = layer.input_layernorm.variance_epsilon

    def forward(
        self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], plait: PagedAttention, **_: Any
    ) -> Tensor:
        """hidden [1, T, H] is changed in place and given back."""
        residual = hidden.view(-1, hidden.shape[-1])
        cos, sin = position_embeddings
        qkv = self.qkv(cpu.rms_norm(residual, self.norm, self.eps))
        cpu.rotate_and_write(plait.iteration, self.index, qkv, cos, sin)
        q = qkv.view(qkv.shape[0], -1, self.dim)[:, : self.q_width // self.dim]
        attended = cpu.attention(plait.iteration, self.index, q, self.scale, self.window)
        x = cpu.rms_norm(self.out(attended.view(-1, self.q_width)), self.mlp_norm, self.eps, residual)
        residual.add_(self.down(cpu.silu_mul(self.gate_up(x))))
        return hidden


def window_of(attention: nn.Module) -> int | None:
    if type(attention).__name__ == "MistralAttention":
        return getattr(attention.config, "sliding_window", None)
    return getattr(attention, "sliding_window", None)


def is_known(layer: nn.Module) -> bool:
    if type(layer).__name__ not in LAYERS or type(layer.input_layernorm).__name__ not in NORMS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(type(x) is nn.Linear for x in linears)
        and layer.self_attn.config.hidden_act in ("silu", "swish")
        and attention.head_dim % 32 == 0
        and mlp.gate_proj.out_features % 16 == 0
        and mlp.gate_proj.bias is None
        and attention.q_proj.in_features % 16 == 0
    )


def optimize(model: nn.Module, attention: PagedAttention) -> None:
    """Change a CPU model in place; its original weights are freed layer by layer."""
    dtype = next(model.parameters()).dtype
    if not can_pack(dtype):
        return
    base = model.base_model
    layers = getattr(base, "layers", None)
    rotary = getattr(base, "rotary_emb", None)
    if (
        attention.backend == "cpu"
        and layers
        and rotary is not None
        and all(is_known(layer) for layer in layers)
    ):
        for i, layer in enumerate(layers):
            layers[i] = FastLayer(layer)
        base.rotary_emb = FloatRotary(rotary)
        if type(base.norm).__name__ in NORMS:
            base.norm = FastNorm(base.norm)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == dtype:
                setattr(parent, name, PackedLinear(child.weight, child.bias))


def warm(dtype: torch.dtype) -> None:
    """Compile the kernels now, so that the first request does not wait for it."""
    if dtype in (torch.float32, torch.bfloat16):
        cpu.library()
