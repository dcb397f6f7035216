"""Faster parts put in place of a transformers model's own on the CPU, where their structure is known.

The decoder layers of a Llama-like model become one compiled `Decoder`; any other linear layer gets packed weights.
Nothing else changes: embedding, rotary frequencies, final norm, logit scaling and whatever else a model does stay
transformers' own. Models that are known to do no more than these are run without the code around them (`Direct`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.attention import Unsupported
from plait.kernels.attention import PagedAttention
from plait.kernels.decoder import Decoder, LayerWeights, PanelLinear, fits
from plait.kernels.linear import PackedLinear, can_pack

LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


class FloatRotary(nn.Module):
    """The model's rotary embedding in float32, whatever the dtype of the model."""

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(x[..., :1].float(), position_ids=position_ids, **kwargs)
        return cos.contiguous(), sin.contiguous()


class Direct:
    """A model whose layers and output matrix are compiled, without the machinery that transformers has around them:
    with it an iteration took 1.5 ms more."""

    def __init__(self, model: nn.Module, layers: Decoder):
        base = model.base_model
        self.embed, self.rotary = base.embed_tokens, base.rotary_emb
        self.layers, self.head = layers, model.lm_head
        self.norm = base.norm.weight.float()
        self.eps = base.norm.variance_epsilon

    def __call__(
        self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: PagedAttention
    ) -> Tensor:
        """Logits [R, vocabulary] in float32 of the rows that are named, of all without; tokens and positions [T]."""
        embedded = self.embed(tokens[None])
        stream = embedded.float()
        self.layers.run(stream, self.rotary(embedded, positions[None]), attention)
        last = stream[0] if rows is None else stream[0, rows]
        last *= torch.rsqrt(last.square().mean(-1, keepdim=True) + self.eps)
        return self.head((last * self.norm).to(embedded.dtype))


def direct(model: nn.Module) -> Direct | None:
    """Where embedding, compiled layers, norm and compiled output matrix are all that the model does."""
    layers = getattr(model.base_model, "layers", None)
    known = type(model).__name__ in MODELS and layers and isinstance(layers[0], Decoder)
    return Direct(model, layers[0]) if known and isinstance(model.lm_head, PanelLinear) else None


def optimize(model: nn.Module, attention: PagedAttention, int8: bool = False) -> list[Decoder | PanelLinear]:
    """Change a CPU model in place; its original weights are freed layer by layer. Gives the compiled parts.

    With `int8` the weights of all linear layers are rounded to 8 bits. Raises Unsupported where that cannot be done.
    """
    dtype = next(model.parameters()).dtype
    base = model.base_model
    compiled: list[Decoder | PanelLinear] = []
    layers, rotary = getattr(base, "layers", None), getattr(base, "rotary_emb", None)
    if (
        attention.backend == "cpu"
        and layers
        and rotary is not None
        and all(is_known(x, dtype) for x in layers)
    ):
        compiled.append(decoder(layers, int8))
        base.layers = nn.ModuleList(compiled)
        base.rotary_emb = FloatRotary(rotary)
        head = getattr(model, "lm_head", None)
        if type(head) is nn.Linear and head.bias is None:
            model.lm_head = PanelLinear(head.weight, int8=int8)
            compiled.append(model.lm_head)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.dtype != dtype:
                continue
            if int8:
                if not fits(dtype, child.in_features):
                    raise Unsupported(
                        "dtype int8 needs plait's compiled CPU kernels and inputs of layers that are a multiple of 16 "
                        f"wide; {name} of {type(model).__name__} has {child.in_features} in {dtype}"
                    )
                compiled.append(PanelLinear(child.weight, child.bias, int8=True, dtype=dtype))
                setattr(parent, name, compiled[-1])
            elif can_pack(dtype):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    if compiled:
        let_go_of_file(model)
    return compiled


def let_go_of_file(model: nn.Module) -> None:
    """What is left of the weights, embedding and norms, may lie in their file, which is mapped as long as one of them
    does: all of it, though most has been packed."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()


def is_known(layer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a layer is exactly what `Decoder` computes."""
    return (
        type(layer).__name__ in LAYERS
        and is_llama_like(layer)
        and layer.self_attn.head_dim % 32 == 0
        and fits(dtype, layer.self_attn.q_proj.in_features, layer.mlp.gate_proj.out_features)
    )


def is_llama_like(layer: nn.Module) -> bool:
    """Whether a decoder layer of a known name has plain projections, biases on QKV alone, and a gated SiLU."""
    attention, mlp = layer.self_attn, layer.mlp
    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    others = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(type(x) is nn.Linear for x in (*inputs, *others))
        and all(x.bias is None for x in others)
        and len({x.bias is None for x in inputs}) == 1
        and attention.config.hidden_act in ("silu", "swish")
    )


def decoder(layers: nn.ModuleList, int8: bool) -> Decoder:
    first = layers[0]
    made = Decoder(first.input_layernorm.variance_epsilon, first.self_attn.scaling, int8)
    for i in range(len(layers)):
        made.add(weights_of(layers[i]))
        layers[i] = nn.Identity()
    made.seal()
    return made


def weights_of(layer: nn.Module) -> LayerWeights:
    a, mlp = layer.self_attn, layer.mlp
    biases = [x.bias for x in (a.q_proj, a.k_proj, a.v_proj)]
    return LayerWeights(
        *(
            x.weight
            for x in (a.q_proj, a.k_proj, a.v_proj, a.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        ),
        norm=layer.input_layernorm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        qkv_bias=None if biases[0] is None else torch.cat(biases),
        window=window_of(a) or 0,
    )


def window_of(attention: nn.Module) -> int | None:
    """The sliding window that the layer passes to its attention."""
    if type(attention).__name__ == "MistralAttention":
        return getattr(attention.config, "sliding_window", None)
    return getattr(attention, "sliding_window", None)
