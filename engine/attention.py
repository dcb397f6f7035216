"""Our paged attention inside transformers' own models, through their AttentionInterface.

A model calls the registered function in each attention layer with q, k, v of the flat row; the keyword
`plait` that the runner passed to the model arrives here with it. The function honours `scaling`,
`sliding_window`, `softcap` and `s_aux`; a keyword it does not know that changes the result is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "plait"


class Unsupported(ValueError):
    """This model cannot be run by plait, and the message says why."""


class Probe:
    """Stands in for the KV pool in one small forward: learns which layers reach us, and with what shapes."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        if layer in self.layers:
            raise Unsupported(f"attention layer {layer} is called twice in one forward")
        if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
            raise Unsupported(
                f"attention layer {layer} has heads of sizes {q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]} "
                "for query, key and value; they must be equal"
            )
        self.layers[layer] = (q.shape[1], k.shape[1], q.shape[2])
        return torch.zeros_like(q)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    plait: Any = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] of the flat row; gives [1, T, Hq, D]."""
    if plait is None:
        raise Unsupported(f"{type(module).__name__} does not hand its keyword arguments on to its attention")
    if not getattr(module, "is_causal", True) or is_causal is False:
        raise Unsupported(f"{type(module).__name__} attends to later tokens too: it is not a decoder")
    if getattr(module, "is_cross_attention", False):
        raise Unsupported(f"{type(module).__name__} attends to an encoder")
    if unknown := [
        name for name in ("position_bias", "head_mask", "cu_seq_lens_q") if others.get(name) is not None
    ]:
        raise Unsupported(f"{type(module).__name__} passes {unknown[0]}, which paged attention does not know")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise Unsupported(f"{type(module).__name__} does not say which layer it is")
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if isinstance(plait, Probe):
        out = plait.attend(layer, q, k, v)
    else:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        plait.write(layer, k, v)
        out = plait.attend(
            layer,
            q,
            scale=q.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)


def probe(model: nn.Module, device: torch.device) -> dict[int, tuple[int, int, int]]:
    """(query heads, KV heads, head size) of every layer of `model`. Raises Unsupported unless each reaches us."""
    seen = Probe()
    expected = model.config.get_text_config().num_hidden_layers
    row = torch.zeros(1, 2, dtype=torch.long, device=device)
    with torch.inference_mode():
        model(input_ids=row, position_ids=torch.arange(2, device=device)[None], use_cache=False, plait=seen)
    missing = sorted(set(range(expected)) - set(seen.layers))
    if missing:
        raise Unsupported(
            f"{type(model).__name__}: {len(missing)} of {expected} layers (first: {missing[0]}) do not reach "
            "paged attention; plait runs decoder models whose every layer goes through transformers' AttentionInterface"
        )
    if len({shape[1:] for shape in seen.layers.values()}) > 1:
        raise Unsupported(f"{type(model).__name__}: KV heads or head sizes differ between layers")
    return seen.layers
