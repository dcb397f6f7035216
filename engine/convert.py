"""Turns a GGUF file into a directory that transformers loads quickly: safetensors, tokenizer, chat template.

Run as `python -m plait.engine.convert FILE.gguf DIRECTORY`, in a process of its own: it needs the whole model
in memory in float32, and leaves nothing behind in the caller.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging


def convert(gguf: Path, directory: Path) -> None:
    """Write model, tokenizer and configuration of `gguf` into `directory`.

    Quantized weights are products that float16 and bfloat16 cannot hold, so they are kept in float32: outputs
    then equal those of transformers reading the GGUF itself in float32. A file whose weights all fit a half
    type without loss is kept in that type.
    """
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # save_pretrained refuses a model that still says it is quantized; its weights no longer are.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(smallest_lossless(model)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def smallest_lossless(model: PreTrainedModel) -> torch.dtype:
    """The smallest of bfloat16, float16 and float32 that holds every weight exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(weight.to(dtype).float(), weight) for weight in model.parameters()):
            return dtype
    return torch.float32


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
