"""Small random models and tokenizers, so that tests of the engine need no download and little time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.llama import LlamaConfig

EOS = 256


def byte_tokenizer(merges: bool = False) -> Backend:
    """One token a byte (id = rank in the GPT-2 alphabet), `<eos>` 256 and `<pad>` 257; with a few merged tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<pad>", special=True)])
    return backend


def fallback_tokenizer() -> Backend:
    """In the manner of Llama 2: pieces with a leading ▁, and bytes as <0xNN> for what is in no piece."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for piece in ("▁", "▁Hello", "Hello", "▁world", "a", "b", "!", "é"):
        vocab[piece] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return backend


def randomize(model: torch.nn.Module, seed: int = 0, scale: float = 1.0) -> torch.nn.Module:
    """Weights large enough that every part of the model changes its logits. Norms stay near one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() >= 2:
                p.copy_(noise * (scale / p.shape[-1] ** 0.5))
            else:
                p.copy_(p + 0.2 * noise)
    return model.eval().requires_grad_(False)


def tiny(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32, attn: str = "eager"):
    """A random causal language model. The configuration is copied: from_config writes into it."""
    config = type(config).from_dict(config.to_dict())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=dtype)
    return randomize(model, seed)


def tiny_llama_config(**changes: object) -> LlamaConfig:
    fields: dict[str, object] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**fields | changes)


def save_tiny_llama(folder: Path, seed: int = 0, **changes: object) -> Path:
    """A model directory: 258 tokens in a vocabulary padded to 320."""
    tiny(tiny_llama_config(**changes), seed).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder
