"""Logits of many model families, by chunked prefill and decodes on a flat row, against transformers' own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    DogeConfig,
    FalconConfig,
    Llama4TextConfig,
    MambaConfig,
    MistralConfig,
    NemotronConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    RobertaConfig,
    T5Config,
)
from transformers.models.mistral.modeling_mistral import MistralAttention

from plait.engine import attention, fastpath, probe
from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.attention import NAME, Unsupported
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
from plait.engine.loader import load
from plait.engine.runner import Runner
from plait.engine.sequence import Chunk, Sequence
from plait.kernels.attention import PagedAttention
from plait.kernels.decoder import Decoder
from tiny_families import COMMON, VOCAB, WINDOW, families
from tiny_models import tiny

FAMILIES = families()
LENGTHS = (37, 5, 21, 1)
# What each of the sequences computes in an iteration: prefills of several chunks beside decodes; 0 is nothing.
CHUNKS = [(5, 4, 0, 0), (9, 1, 16, 0), (1, 0, 1, 1), (1, 0, 1, 0), (16, 0, 1, 0), (1, 0, 2, 0), (4, 0, 0, 0)]


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    # OPT takes 1 for padding and has no vector for it.
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in LENGTHS]


def paged_logits(runner: Runner) -> list[list[tuple[int, Tensor]]]:
    """By sequence: positions and the logits after them, computed as CHUNKS says, in blocks out of order."""
    runner.attention.pool.fill_(float("nan"))
    all_tokens = [p.tolist() for p in prompts()]
    seqs = []
    for i, tokens in enumerate(all_tokens):
        seq = Sequence.of(GenerationRequest(str(i), tokens), 0.0)
        seq.seat, seq.blocks = i, [3 + i, 20 - i, 11 + i]
        seqs.append(seq)
    got: list[list[tuple[int, Tensor]]] = [[] for _ in seqs]
    for counts in CHUNKS:
        chunks = []
        for seq, tokens, n in zip(seqs, all_tokens, counts, strict=True):
            if n:
                seq.tokens = tokens[: seq.computed + n]
                chunks.append(Chunk(seq, n))
        chunks.sort(key=lambda c: c.count > 1)
        for chunk, logits in zip(chunks, runner.run(chunks), strict=True):
            chunk.seq.computed += chunk.count
            got[int(chunk.seq.id)].append((chunk.seq.computed - 1, logits.float()))
    assert [seq.computed for seq in seqs] == list(LENGTHS)
    return got


def own_logits(model: nn.Module) -> list[Tensor]:
    with torch.inference_mode():
        return [model(input_ids=p[None], use_cache=False).logits[0].float() for p in prompts()]


def difference(model: nn.Module, reference: list[Tensor]) -> float:
    runner = Runner(model, EngineConfig(num_blocks=24, max_running=4))
    got = paged_logits(runner)
    return max(
        float((ref[p] - x).abs().max()) for rows, ref in zip(got, reference, strict=True) for p, x in rows
    )


def ours(config: PreTrainedConfig, **kwargs: Any) -> nn.Module:
    return tiny(config, attn=NAME, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    reference = own_logits(tiny(FAMILIES[family]))
    assert min(float(x.std()) for x in reference) > 0.1, "too dull to show a difference"
    assert difference(ours(FAMILIES[family]), reference) < 1e-4


def test_these_families_take_every_path() -> None:
    """Compiled layers, compiled attention under transformers' layers, and the torch reference."""
    kinds = {}
    for family in ("llama", "qwen2", "mistral", "llama-narrow", "llama-reference"):
        model = ours(FAMILIES[family])
        backend = Runner(model, EngineConfig(num_blocks=4, max_running=1)).attention.backend
        kinds[family] = (backend, isinstance(model.model.layers[0], Decoder))
    assert kinds == {
        "llama": ("cpu", True),
        "qwen2": ("cpu", True),
        "mistral": ("cpu", True),
        "llama-narrow": ("cpu", False),
        "llama-reference": ("torch", False),
    }


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt-oss", "qwen2-window"])
def test_the_torch_reference_agrees_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.kernels.cpu.takes", lambda pool, q_heads: False)
    reference = own_logits(tiny(FAMILIES[family]))
    assert difference(ours(FAMILIES[family]), reference) < 1e-4


@pytest.mark.parametrize(
    "keyword,family",
    [
        ("window", "mixtral"),
        ("window", "gemma3"),
        ("window", "olmo3"),
        ("window", "phi3"),
        ("softcap", "gemma2"),
        ("sinks", "gpt-oss"),
        ("scale", "gemma2"),
        ("scale", "granite"),
        ("scale", "gemma3"),
    ],
)
def test_a_keyword_that_is_ignored_is_noticed(
    keyword: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = PagedAttention.attend

    def forgetful(self: PagedAttention, layer: int, q: Tensor, **keywords: Any) -> Tensor:
        keywords[keyword] = q.shape[-1] ** -0.5 if keyword == "scale" else None
        return attend(self, layer, q, **keywords)

    monkeypatch.setattr(PagedAttention, "attend", forgetful)
    assert difference(ours(FAMILIES[family]), own_logits(tiny(FAMILIES[family]))) > 1e-2


@pytest.mark.parametrize("family", ["mistral", "qwen2-window"])
def test_a_window_that_the_compiled_layers_ignore_is_noticed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastpath, "window_of", lambda layer: None)
    assert difference(ours(FAMILIES[family]), own_logits(tiny(FAMILIES[family]))) > 1e-2


@pytest.mark.parametrize("family", ["llama", "llama-narrow", "mistral", "qwen2", "gemma2", "qwen3-moe"])
def test_bfloat16_is_no_worse_than_that_of_transformers(family: str) -> None:
    exact = own_logits(tiny(FAMILIES[family]))
    theirs = own_logits(tiny(FAMILIES[family], dtype=torch.bfloat16))
    runner = Runner(ours(FAMILIES[family], dtype=torch.bfloat16), EngineConfig(num_blocks=24, max_running=4))
    errors_ours, errors_theirs = [], []
    for rows, reference, other in zip(paged_logits(runner), exact, theirs, strict=True):
        for p, x in rows:
            errors_ours.append((x - reference[p]).square().mean())
            errors_theirs.append((other[p] - reference[p]).square().mean())
    ratio = (torch.stack(errors_ours).mean() / torch.stack(errors_theirs).mean()).sqrt()
    assert ratio < 1.5


S = COMMON
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "falcon": (
        FalconConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        "does not go through transformers' AttentionInterface",
    ),
    "bloom": (
        BloomConfig(vocab_size=96, hidden_size=64, n_layer=2, n_head=4),
        "do not reach paged attention",
    ),
    "mamba": (
        MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, state_size=8),
        "2 of 2 layers .* do not reach paged attention",
    ),
    "t5": (
        T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4),
        "encoder-decoder",
    ),
    "bert": (
        BertConfig(
            vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
        ),
        "attends to later tokens",
    ),
    "roberta": (
        RobertaConfig(
            vocab_size=96,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            is_decoder=True,
        ),
        "positions of tokens",
    ),
    "qwen3-next": (
        Qwen3NextConfig(
            **S,
            head_dim=16,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=2,
            num_experts_per_tok=1,
            layer_types=["linear_attention", "full_attention"],
        ),
        "1 of 2 layers",
    ),
    "llama4": (
        Llama4TextConfig(
            **S, head_dim=16, attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=96
        ),
        "chunked_attention",
    ),
    "doge": (DogeConfig(**S), "a mask of its own"),
    "nemotron": (NemotronConfig(**S), "does not hand its keyword arguments on"),
    "deepseek-v3": (
        DeepseekV3Config(
            **S | {"num_key_value_heads": 4},
            kv_lora_rank=32,
            q_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        ),
        "sizes 32 and 16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_be_wrong_is_refused_at_load(name: str, tmp_path: Path) -> None:
    config, message = REFUSED[name]
    made = AutoModel if config.is_encoder_decoder else AutoModelForCausalLM
    made.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=message):
        Engine(EngineConfig(model=str(tmp_path), dtype="float32", num_blocks=4, max_running=1))


def test_a_decoder_without_its_encoder_that_counts_positions_itself_is_refused() -> None:
    config = BartConfig(
        **{"vocab_size": 96, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4},
        encoder_layers=2,
        decoder_ffn_dim=64,
        is_decoder=True,
        is_encoder_decoder=False,
    )
    with pytest.raises(Unsupported, match="positions of tokens"):
        Runner(AutoModelForCausalLM.from_config(config, attn_implementation=NAME), EngineConfig(num_blocks=4))


def test_a_window_that_does_not_reach_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MistralConfig(**S, sliding_window=WINDOW)
    config.layer_types = ["sliding_attention", "full_attention"]
    probe.probe(ours(config), torch.device("cpu"))
    forward = MistralAttention.forward

    def windowless(self: MistralAttention, *args: Any, **kwargs: Any) -> Any:
        self.config.sliding_window = None
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(MistralAttention, "forward", windowless)
    with pytest.raises(Unsupported, match="layer 0 has a sliding window but does not pass it"):
        probe.probe(ours(config), torch.device("cpu"))


@pytest.mark.parametrize("name", ["position_bias", "head_mask"])
def test_an_unknown_keyword_that_changes_the_result_is_refused(name: str) -> None:
    x = torch.zeros(1, 2, 3, 16)
    module = nn.Module()
    module.layer_idx = 0
    with pytest.raises(Unsupported, match=name):
        attention.paged_attention(module, x, x, x, plait=probe.Probe(), **{name: x})


def test_what_is_no_model_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(Unsupported, match="unheard-of"):
        load(EngineConfig(model=str(tmp_path)))


def test_rotary_frequencies_that_depend_on_the_batch_bound_the_length() -> None:
    """longrope switches the frequencies of all sequences when one is long: here none may be."""
    engine = Engine(EngineConfig(num_blocks=24, max_running=2), model=ours(FAMILIES["phi3-longrope"]))
    assert engine.model.max_tokens_total == 64
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    done = engine.generate(
        [GenerationRequest("a", [5] * 60, sampling), GenerationRequest("b", [7], sampling)]
    )
    assert len(done["a"]) == 4 and len(done["b"]) == 63
