"""Tiny configurations of many model families. Sizes suit the compiled CPU kernels unless a comment says otherwise."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

VOCAB = 96
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
WINDOW = 7


def families() -> dict[str, PreTrainedConfig]:
    wide = COMMON | {"head_dim": 32}
    sliding = ["sliding_attention", "full_attention"]
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.5] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 64,
    }
    return {
        "llama": LlamaConfig(**wide),
        "llama-scaled-rope": LlamaConfig(
            **wide,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        "llama-biases": LlamaConfig(**wide, attention_bias=True, mlp_bias=True),
        # Head size 16: packed weights and the compiled attention, but transformers' own layers.
        "llama-narrow": LlamaConfig(**COMMON),
        # Head size 24: the torch reference.
        "llama-reference": LlamaConfig(**COMMON | {"hidden_size": 96, "num_attention_heads": 4}),
        "qwen2": Qwen2Config(**COMMON | {"hidden_size": 128}),
        "qwen2-window": Qwen2Config(
            **COMMON | {"hidden_size": 128},
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=1,
            layer_types=["full_attention", "sliding_attention"],
        ),
        "mistral": MistralConfig(**wide, sliding_window=WINDOW),
        "mixtral": MixtralConfig(**wide, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
        "qwen3": Qwen3Config(**wide),
        "qwen3-moe": Qwen3MoeConfig(**wide, **moe),
        "gemma2": Gemma2Config(
            **wide | {"head_dim": 16},
            sliding_window=WINDOW,
            query_pre_attn_scalar=50,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=5.0,
            layer_types=sliding,
        ),
        "gemma3": Gemma3TextConfig(
            **wide | {"head_dim": 16}, sliding_window=WINDOW, query_pre_attn_scalar=40, layer_types=sliding
        ),
        "phi3": Phi3Config(**COMMON, sliding_window=WINDOW),
        "phi3-longrope": Phi3Config(**COMMON, original_max_position_embeddings=64, rope_parameters=longrope),
        "olmo2": Olmo2Config(**COMMON),
        "olmo3": Olmo3Config(**COMMON, sliding_window=WINDOW, layer_types=sliding),
        "smollm3": SmolLM3Config(**COMMON, no_rope_layers=[1, 0]),
        "gpt-oss": GptOssConfig(
            **wide,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=sliding,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        "granite": GraniteConfig(
            **COMMON, attention_multiplier=0.31, logits_scaling=3.0, embedding_multiplier=4.0
        ),
        "gpt2": GPT2Config(
            vocab_size=VOCAB,
            n_positions=128,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=None,
            eos_token_id=None,
        ),
        "gpt-neox": GPTNeoXConfig(**COMMON | {"num_key_value_heads": None}, rotary_pct=0.5),
        "opt": OPTConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            word_embed_proj_dim=64,
            pad_token_id=1,
            bos_token_id=2,
            eos_token_id=2,
        ),
    }
