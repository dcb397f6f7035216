"""One look at a loaded model: whether paged attention on a flat row computes what the model means.

A model that would run and be wrong is refused: one with layers that bypass us, that hides tokens in ways that reach
us by no keyword, or that does not take the positions of tokens from its input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.attention import Unsupported


@dataclass(slots=True)
class Seen:
    """What one layer asked of its attention."""

    key: Tensor
    query: Tensor | None = None
    window: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.query.shape[1], *self.key.shape[1:]


class Probe:
    """Stands in for PagedAttention in a small forward and remembers what it is given."""

    def __init__(self) -> None:
        self.layers: dict[int, Seen] = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        if layer in self.layers:
            raise Unsupported(f"attention layer {layer} is called twice in one forward")
        if k.shape != v.shape:
            raise Unsupported(
                f"attention layer {layer} has heads of sizes {k.shape[-1]} and {v.shape[-1]} for key and value; "
                "they must be equal"
            )
        self.layers[layer] = Seen(k)

    def attend(self, layer: int, q: Tensor, *, window: int | None, **_: Any) -> Tensor:
        self.layers[layer].query, self.layers[layer].window = q, window
        return torch.zeros_like(q)


def probe(model: nn.Module, device: torch.device) -> list[tuple[int, int, int]]:
    """(query heads, KV heads, head size) of every layer of `model`. Raises Unsupported when plait cannot run it."""
    name, text = type(model).__name__, model.config.get_text_config()
    once = look(model, device, 1, [0, 1])
    expected = text.num_hidden_layers
    if missing := sorted(set(range(expected)) - set(once)):
        raise Unsupported(
            f"{name}: {len(missing)} of {expected} layers (first: {missing[0]}) do not reach "
            "paged attention; plait runs decoder models whose every layer goes through transformers' AttentionInterface"
        )
    shapes = [once[layer].shape for layer in sorted(once)]
    if len(set(shapes)) > 1:
        raise Unsupported(f"{name}: numbers of heads or head sizes differ between layers")
    for layer, kind in enumerate(getattr(text, "layer_types", None) or []):
        if kind == "sliding_attention" and once[layer].window is None:
            raise Unsupported(
                f"{name}: layer {layer} has a sliding window but does not pass it to its attention"
            )
        if kind not in ("sliding_attention", "full_attention"):
            raise Unsupported(f"{name}: layer {layer} is of the type {kind}, which plait does not know")
    twice = look(model, device, 2, [0, 1, 0, 1])
    unaided = look(model, device, 1, None)
    for layer, seen in once.items():
        same = close(twice[layer].query[:2], twice[layer].query[2:]) and close(
            twice[layer].key[:2], twice[layer].key[2:]
        )
        if not (same and close(seen.query, unaided[layer].query) and close(seen.key, unaided[layer].key)):
            raise Unsupported(f"{name} does not take the positions of tokens from its input")
    return shapes


def look(model: nn.Module, device: torch.device, times: int, positions: list[int] | None) -> dict[int, Seen]:
    """What each layer asks when two tokens, so many times, lie on one row; attention gives zeros."""
    probe = Probe()
    size = model.config.get_text_config().vocab_size
    row = torch.tensor([[size // 3, size // 2] * times], device=device)
    where = {} if positions is None else {"position_ids": torch.tensor([positions], device=device)}
    try:
        with torch.inference_mode():
            last = torch.tensor([row.shape[1] - 1], device=device)
            model(input_ids=row, use_cache=False, logits_to_keep=last, plait=probe, **where)
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(f"{type(model).__name__} does not run on a flat row of tokens: {error}") from error
    return probe.layers


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding: positions that differ by one change far more than that."""
    return torch.allclose(a, b, rtol=0, atol=0.05 * float(a.abs().max()), equal_nan=True)
