"""From a model's name to a model on its device whose every layer reaches paged attention."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from plait.engine.attention import NAME, Unsupported
from plait.engine.config import EngineConfig
from plait.engine.models import keep, narrowed, resolve


def load(config: EngineConfig) -> nn.Module:
    """The model in evaluation mode. Raises Unsupported or ModelUnavailable with a message for the user."""
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    path = resolve(config.model)
    narrow = narrowed(path, str(dtype).removeprefix("torch."))
    if narrow and narrow.is_dir():
        path, narrow = narrow, None
    try:
        described = AutoConfig.from_pretrained(path)
        if getattr(described, "is_encoder_decoder", False):
            raise Unsupported(f"{described.model_type} is an encoder-decoder model; plait runs decoders")
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=described,
            dtype=dtype,
            attn_implementation=NAME,
            device_map={"": device} if device.type == "cuda" else None,
        )
    except (KeyError, ValueError, ImportError) as error:
        why = error
        if isinstance(error, KeyError) and error.args == (NAME,):
            why = "its attention does not go through transformers' AttentionInterface"
        raise Unsupported(f"{config.model} cannot be loaded: {why}") from error
    if narrow:
        keep(narrow, model.save_pretrained)
    return model.eval().requires_grad_(False)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Unsupported(f"device {name} was asked for, but this torch sees no GPU")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, else float16 on a GPU and float32 on a CPU.

    `int8` rounds weights alone: they are loaded, and all else is computed, as with `auto`. Raises Unsupported on a GPU.
    """
    if name == "int8" and device.type != "cpu":
        raise Unsupported(f"dtype int8 is for the CPU; on {device} use bfloat16")
    if name not in ("auto", "int8"):
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def eos_ids(model: nn.Module) -> frozenset[int]:
    """Ids that end a text, by the model's generation configuration, else by its configuration."""
    for source in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
