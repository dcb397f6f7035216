"""The bundled model with a quarter of the KV pool that its load needs: the tokens of a pool that is enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.assemble import make_scheduler
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
from plait.engine.kv_cache import KvCache
from plait.engine.models import resolve
from plait.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.model
COUNT, LONGEST, SIZE = 8, 30, 16


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(dtype="float32", num_blocks=128, max_running=COUNT, max_model_len=200))


@pytest.fixture(scope="module")
def load() -> list[GenerationRequest]:
    """Half of the prompts begin alike; some are drawn, with penalties that look at all tokens."""
    tokenizer = Tokenizer(resolve("smollm2"))
    common = "Answer in one short sentence, in plain words. "
    requests = []
    for i in range(COUNT):
        text = (common * 2 if i % 2 else f"{i} ") + f"What is {i} times {i + 1}? " * (1 + i % 3)
        sampling = SamplingParams(temperature=0.0, max_tokens=LONGEST, ignore_eos=True, seed=i)
        if i % 3 == 2:
            sampling = replace(sampling, temperature=0.8, frequency_penalty=0.5, repetition_penalty=1.2)
        ids = tokenizer.encode(text)
        requests.append(GenerationRequest(str(i), ids, sampling, priority=i % 3))
    return requests


@pytest.fixture(scope="module")
def quarter(load: list[GenerationRequest]) -> int:
    return sum(-(-(len(r.prompt_token_ids) + LONGEST) // SIZE) for r in load) // 4


def run(
    engine: Engine, load: list[GenerationRequest], blocks: int, host_blocks: int, **config: object
) -> tuple[dict[str, list[int]], KvCache]:
    """The loaded engine with a scheduler and a pool of its own."""
    runner = engine.runner
    engine.scheduler = make_scheduler(
        EngineConfig(max_running=COUNT, token_budget=64, watermark=0.0, **config),
        blocks,
        "cpu",
        engine.clock,
        host_blocks=host_blocks,
        mover=runner.mover,
        costs=runner.costs,
    )
    done = engine.generate(load)
    engine.scheduler.check()
    engine.scheduler.kv.check_idle()
    return done, engine.scheduler.kv


@pytest.fixture(scope="module")
def expected(engine: Engine, load: list[GenerationRequest]) -> dict[str, list[int]]:
    done, _ = run(engine, load, 128, 0, preemption="recompute", prefix_cache=False)
    assert engine.scheduler.preemptions == 0
    return done


@pytest.mark.parametrize(
    "preemption,prefix_cache",
    [("swap", False), ("recompute", False), ("auto", True), ("swap", True)],
)
def test_output_is_that_of_an_unpreempted_run(
    engine: Engine,
    load: list[GenerationRequest],
    quarter: int,
    expected: dict[str, list[int]],
    preemption: str,
    prefix_cache: bool,
) -> None:
    """nano-vllm#211, #217: preemption and prefix hits together lose nothing."""
    done, kv = run(engine, load, quarter, 128, preemption=preemption, prefix_cache=prefix_cache)
    preemptions = engine.scheduler.preemptions
    assert preemptions > 2, "nobody was preempted: the pool is too large"
    assert done == expected
    if preemption == "recompute":
        assert kv.swaps == 0
    if preemption == "swap":
        assert kv.swaps == preemptions and kv.store.swapped_out and kv.store.swapped_in
    assert bool(kv.hit_tokens) == prefix_cache


def test_a_full_cpu_pool_falls_back_to_recomputing(
    engine: Engine, load: list[GenerationRequest], quarter: int, expected: dict[str, list[int]]
) -> None:
    """vllm#546, #787"""
    done, kv = run(engine, load, quarter, 3, preemption="swap", prefix_cache=False)
    assert 0 < kv.swaps < engine.scheduler.preemptions
    assert done == expected
