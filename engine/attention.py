"""Our paged attention inside transformers' own models, through their AttentionInterface.

A model calls the registered function in each attention layer with q, k, v of the flat row; the keyword
`plait` that the runner passed to the model arrives here with it. The function honours `scaling`,
`sliding_window`, `softcap` and `s_aux`; a keyword it does not know that changes the result is an error.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "plait"


class Unsupported(ValueError):
    """This model cannot be run by plait, and the message says why."""


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
    if attention_mask is not None:
        raise Unsupported(
            f"{type(module).__name__} passes a mask of its own, which paged attention does not know"
        )
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise Unsupported(f"{type(module).__name__} does not say which layer it is")
    if query.shape[-1] != key.shape[-1]:
        raise Unsupported(f"{type(module).__name__} has queries and keys of different sizes")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
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
