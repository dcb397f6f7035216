"""What a GPU runs, as far as a CPU can tell: fused layers on the reference, and "graphs" that are the plain calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from plait.engine import fused, graphs, pool
from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
from plait.engine.sequence import Sequence
from plait.engine.staging import ALIGN, Staging
from plait.engine.tables import BlockTables
from plait.kernels.attention import PagedAttention
from tiny_families import families
from tiny_models import tiny

CPU = torch.device("cpu")
FAMILIES = families()
PROMPTS = [[(7 * i + j * j) % 90 + 1 for j in range(3 + 5 * i)] for i in range(12)]
SAMPLING = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)


def plainly(call: graphs.Replay) -> graphs.Replay:
    return call


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.kernels.cpu.takes", lambda pool, q_heads: False)

    def optimize(model: nn.Module, attention: PagedAttention, int8: bool) -> list[Any]:
        fused.fuse(model)
        return []

    monkeypatch.setattr("plait.engine.fastpath.optimize", optimize)


def crowded(family: str) -> Engine:
    """A pool so small that some are preempted."""
    config = EngineConfig(num_blocks=24, block_size=8, max_running=6, token_budget=32)
    return Engine(config, tiny(FAMILIES[family], attn="plait"))


def greedy(engine: Engine) -> list[list[int]]:
    done = engine.generate(GenerationRequest(str(i), p, SAMPLING) for i, p in enumerate(PROMPTS))
    return [done[str(i)] for i in range(len(PROMPTS))]


@cache
def by_transformers(family: str) -> list[list[int]]:
    model = tiny(FAMILIES[family])
    out = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(14):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        out.append(ids[len(prompt) :])
    return out


@pytest.mark.parametrize("family", ["llama", "qwen2-window", "mistral", "qwen3", "gemma2"])
def test_greedy_is_that_of_transformers(family: str, as_on_a_gpu: None) -> None:
    """Fused layers where they are known, decodes through graphs of 1, 2, 4 and 6 rows, preemptions in between."""
    engine = crowded(family)
    fused_layers = [m for m in engine.runner.model.modules() if isinstance(m, fused.FusedLayers)]
    assert len(fused_layers) == (family != "gemma2")
    engine.runner.graphs.capture(plainly)
    ran: list[int] = []
    for size, replay in engine.runner.graphs.replays.items():
        engine.runner.graphs.replays[size] = noted(ran, size, replay)
    assert greedy(engine) == by_transformers(family)
    assert engine.scheduler.preemptions > 0
    assert set(ran) == {1, 2, 4, 6}


def noted(ran: list[int], size: int, replay: graphs.Replay) -> graphs.Replay:
    def run() -> None:
        ran.append(size)
        replay()

    return run


def test_what_cannot_be_captured_runs_eagerly_and_is_named(
    as_on_a_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = crowded("llama")
    record = failing_after(2)
    with caplog.at_level(logging.WARNING):
        engine.runner.graphs.capture(record)
    assert "2 of 4 sizes" in caplog.text and "RuntimeError: no room" in caplog.text
    assert engine.runner.graphs.captured == [4, 6]
    assert greedy(engine) == by_transformers("llama")

    engine = crowded("llama")
    engine.runner.graphs.capture(failing_after(0))
    assert not engine.runner.graphs.takes(1)
    assert greedy(engine) == by_transformers("llama")


def failing_after(count: int) -> Callable[[graphs.Replay], graphs.Replay]:
    left = iter(range(count))

    def record(call: graphs.Replay) -> graphs.Replay:
        if next(left, None) is None:
            raise RuntimeError("no room")
        return call

    return record


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gemma2", "Gemma2DecoderLayer is not known"),
        ("llama-biases", "LlamaDecoderLayer is not known, or has"),
    ],
)
def test_layers_that_are_not_fused_are_named(
    family: str, why: str, as_on_a_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    crowded(family)
    assert why in caplog.text


def test_a_part_of_a_head_that_turns_is_not_fused() -> None:
    model = tiny(FAMILIES["llama"])
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:4]
    assert not fused.fuse(model)
    assert not any(isinstance(m, fused.FusedLayers) for m in model.modules())


@pytest.mark.parametrize("largest", [1, 2, 3, 6, 8, 64, 100, 256])
def test_sizes_waste_little(largest: int) -> None:
    made = graphs.sizes(largest)
    assert made[-1] == largest and made == sorted(set(made))
    for n in range(1, largest + 1):
        size = next(s for s in made if s >= n)
        assert size - n <= max(n - 1, 7) and (n < 64 or size - n < 16)


def test_a_pool_of_the_default_size_leaves_room_for_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "free_bytes", lambda device: 10 << 30)
    reserve = graphs.memory(64, 128_000, 2)
    without = pool.plan(EngineConfig(), 1 << 20, torch.device("cuda"), 0)
    left = (10 << 30) - (pool.plan(EngineConfig(), 1 << 20, torch.device("cuda"), reserve) << 20)
    assert left >= (10 << 30) - (without << 20) + 0.9 * reserve - (1 << 20)
    assert reserve > 11 * graphs.GRAPH_BYTES


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([np.int32, np.int64, np.float64]), st.integers(0, 5000)), max_size=6)
)
def test_staged_arrays_arrive_whole_and_aligned(parts: list[tuple[Any, int]]) -> None:
    staging = Staging(CPU)
    arrays = [np.arange(n, dtype=kind) * 3 for kind, n in parts]
    for array, tensor in zip(arrays, staging.sent(*arrays), strict=True):
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
        assert (tensor.data_ptr() - staging.packed.data_ptr()) % ALIGN == 0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["grow", "evict", "replace", "flush"])), max_size=40
    )
)
def test_tables_on_the_device_are_those_of_the_sequences(steps: list[tuple[int, str]]) -> None:
    tables = BlockTables(3, 50, CPU)
    seqs = [Sequence.of(GenerationRequest(str(i), [1]), 0.0) for i in range(3)]
    for i, seq in enumerate(seqs):
        seq.seat = (i + 1) % 3
    block = 0
    for which, step in [*steps, (0, "flush")]:
        seq = seqs[which]
        if step == "grow":
            seq.blocks = [*seq.blocks, block + 1, block + 2][:50]
            block += 2
        elif step == "evict":
            seq.blocks, seq.preemptions = [], seq.preemptions + 1
        elif step == "replace" and seq.blocks:
            seq.blocks[0], seq.replaced = block + 1, seq.replaced + 1
            block += 1
        elif step == "flush":
            seats = [tables.seat(s) for s in seqs]
            tables.flush()
            for seat, s in zip(seats, seqs, strict=True):
                assert tables.rows[seat, : len(s.blocks)].tolist() == s.blocks


def test_a_model_is_freed_layer_by_layer() -> None:
    model: nn.Module = tiny(FAMILIES["qwen3"])
    assert fused.fuse(model)
    left = {name for name, _ in model.named_parameters()}
    assert left == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
