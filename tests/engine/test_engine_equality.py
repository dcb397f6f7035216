"""The engine with the bundled model: token for token what transformers generates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
from plait.engine.models import resolve
from plait.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.model
TOPICS = ("the sea", "a recipe for bread", "why the sky is blue", "prime numbers", "a letter to a friend")
COUNT, LONGEST = 32, 16


def engine(**config: object) -> Engine:
    return Engine(EngineConfig(model="smollm2", dtype="float32", **config))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Chats and raw texts of 1 to about 170 tokens."""
    tokenizer = Tokenizer(resolve("smollm2"))
    out = []
    for i in range(COUNT):
        words = f"Write about {TOPICS[i % 5]}. " * (1 + i % 7)
        raw = i % 4 == 3
        ids = tokenizer.encode(words) if raw else tokenizer.encode_chat([{"role": "user", "content": words}])
        out.append(ids + tokenizer.encode("One two three four. " * (i % 8)) if not raw else ids)
    out[3] = out[3][:1]
    return out


@pytest.fixture(scope="module")
def crowded() -> Engine:
    """A pool that is too small for what runs together, and a budget that cuts prompts."""
    return engine(num_blocks=36, max_running=12, token_budget=48)


def greedy_by_transformers(prompts: list[list[int]], eos: int | None) -> list[list[int]]:
    """`generate` on static batches with padding on the left; without `eos` no text ends early."""
    model = AutoModelForCausalLM.from_pretrained(resolve("smollm2"), dtype=torch.float32).eval()
    # What generate is not told it takes from here.
    model.config.eos_token_id = model.generation_config.eos_token_id = eos
    settings = GenerationConfig(max_new_tokens=LONGEST, do_sample=False, eos_token_id=eos, pad_token_id=0)
    out: list[list[int]] = []
    for start in range(0, len(prompts), 16):
        batch = prompts[start : start + 16]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=mask, generation_config=settings)
        for row in made[:, width:].tolist():
            out.append(row[: row.index(eos) + 1] if eos in row else row)
    return out


def requests(prompts: list[list[int]], sampling: SamplingParams) -> list[GenerationRequest]:
    return [
        GenerationRequest(str(i), p, replace(sampling, seed=i), priority=i % 10)
        for i, p in enumerate(prompts)
    ]


def test_greedy_is_that_of_transformers_under_preemption(crowded: Engine, prompts: list[list[int]]) -> None:
    lengths = sorted(map(len, prompts))
    assert lengths[0] == 1 and lengths[-1] > 100 and len(set(lengths)) > 15
    expected = greedy_by_transformers(prompts, eos=None)
    before = crowded.scheduler.preemptions
    sampling = SamplingParams(temperature=0.0, max_tokens=LONGEST, ignore_eos=True)
    done = crowded.generate(requests(prompts, sampling))
    assert crowded.scheduler.preemptions > before, "nobody was preempted: the pool is too large"
    assert [done[str(i)] for i in range(COUNT)] == expected
    assert crowded.scheduler.kv.blocks.available == 36


def test_greedy_ends_where_transformers_ends(crowded: Engine) -> None:
    tokenizer = Tokenizer(resolve("smollm2"))
    asked = ["What is 2+2? One word.", "Say yes.", "What is the capital of France? One word."]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in asked]
    (eos,) = crowded.eos
    expected = greedy_by_transformers(prompts, eos)
    assert any(tokens[-1] == eos and len(tokens) < LONGEST for tokens in expected)
    done = crowded.generate(requests(prompts, SamplingParams(temperature=0.0, max_tokens=LONGEST)))
    assert [done[str(i)] for i in range(len(prompts))] == expected


def test_seeded_ones_draw_the_same_alone_together_and_continued(
    crowded: Engine, prompts: list[list[int]]
) -> None:
    some = prompts[:8]
    kinds = [
        SamplingParams(temperature=0.7, max_tokens=12),
        SamplingParams(temperature=0.0, max_tokens=12),
        SamplingParams(top_p=0.9, top_k=50, max_tokens=12, frequency_penalty=0.4),
        SamplingParams(temperature=1.5, min_p=0.05, max_tokens=12),
    ]
    batch = [
        replace(r, sampling=replace(kinds[i % 4], seed=i)) for i, r in enumerate(requests(some, kinds[0]))
    ]
    together = crowded.generate(batch)
    alone = {r.request_id: crowded.generate([r])[r.request_id] for r in batch}
    assert together == alone
    assert len({tuple(tokens[:4]) for tokens in together.values()}) > 3
    continued = [replace(r, output_token_ids=together[r.request_id][:7]) for r in batch]
    assert crowded.generate(continued) == together
