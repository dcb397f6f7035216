"""The engine as a library: what went wrong elsewhere, on tiny random models."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.engine import pool
from plait.engine.api import GenerationRequest, Objectives, RequestRefused, SamplingParams
from plait.engine.attention import NAME
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
from plait.engine.loader import load, pick_dtype
from plait.engine.pool import OutOfMemory
from plait.engine.recorder import read as read_record
from plait.engine.sequence import Status
from tiny_models import EOS, save_tiny_llama, tiny, tiny_llama_config

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def engine(**config: Any) -> Engine:
    fields: dict[str, Any] = {"num_blocks": 8, "max_running": 4, "vocab_size": 258}
    return Engine(EngineConfig(**fields | config), model=tiny(tiny_llama_config(), attn=NAME))


def request(
    name: str, prompt: int | list[int], sampling: SamplingParams = GREEDY, **kwargs: Any
) -> GenerationRequest:
    ids = prompt if isinstance(prompt, list) else [(3 * i + len(name)) % 256 for i in range(prompt)]
    return GenerationRequest(name, ids, sampling, **kwargs)


def idle(made: Engine) -> bool:
    made.scheduler.check()
    return (
        not made.has_work() and not made.seqs and made.scheduler.kv.blocks.available == made.model.num_blocks
    )


@pytest.mark.parametrize(
    "bad,code,field",
    [
        (request("r", []), "invalid_request", "prompt"),
        (request("r", 128), "prompt_too_long", "prompt"),
        (request("r", 5000), "prompt_too_long", "prompt"),
        (request("r", 100, replace(GREEDY, max_tokens=29)), "invalid_request", "sampling.max_tokens"),
        (request("r", [5, 258]), "invalid_request", "prompt_token_ids"),
        (request("r", [-1]), "invalid_request", "prompt_token_ids"),
        (request("r", [1], output_token_ids=[300]), "invalid_request", "output_token_ids"),
        (request("r", [1], replace(GREEDY, logit_bias={258: 1.0})), "invalid_request", "sampling.logit_bias"),
        (request("r", [1], replace(GREEDY, logit_bias={-1: 1.0})), "invalid_request", "sampling.logit_bias"),
        (
            request("r", [1], replace(GREEDY, logit_bias={1: math.nan})),
            "invalid_request",
            "sampling.logit_bias",
        ),
        (
            request("r", [1], replace(GREEDY, logit_bias={1: math.inf})),
            "invalid_request",
            "sampling.logit_bias",
        ),
        (
            request("r", [1], replace(GREEDY, stop_token_ids=(999,))),
            "invalid_request",
            "sampling.stop_token_ids",
        ),
        (request("r", [1], replace(GREEDY, temperature=math.nan)), "invalid_request", "sampling.temperature"),
        (request("r", [1], replace(GREEDY, temperature=math.inf)), "invalid_request", "sampling.temperature"),
        (request("r", [1], replace(GREEDY, temperature=-1.0)), "invalid_request", "sampling.temperature"),
        (request("r", [1], replace(GREEDY, top_p=0.0)), "invalid_request", "sampling.top_p"),
        (request("r", [1], replace(GREEDY, top_p=math.nan)), "invalid_request", "sampling.top_p"),
        (request("r", [1], replace(GREEDY, min_p=1.5)), "invalid_request", "sampling.min_p"),
        (
            request("r", [1], replace(GREEDY, repetition_penalty=0.0)),
            "invalid_request",
            "sampling.repetition_penalty",
        ),
        (
            request("r", [1], replace(GREEDY, presence_penalty=math.inf)),
            "invalid_request",
            "sampling.presence_penalty",
        ),
        (request("r", [1], replace(GREEDY, max_tokens=0)), "invalid_request", "sampling.max_tokens"),
        (request("r", [1], replace(GREEDY, min_tokens=-1)), "invalid_request", "sampling.min_tokens"),
        (request("r", [1], replace(GREEDY, seed=2**64)), "invalid_request", "sampling.seed"),
        (request("r", [1], replace(GREEDY, logprobs=-1)), "invalid_request", "sampling.logprobs"),
        (request("r", [1], replace(GREEDY, stop=("",))), "invalid_request", "sampling.stop"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_can_never_run_is_refused_before_the_device_sees_it(
    bad: GenerationRequest, code: str, field: str, refusing: Engine
) -> None:
    """vllm#39734, #16529, #7283, sglang#31908, #28153: here a pool of 128 tokens and 258 tokens of vocabulary."""
    with pytest.raises(RequestRefused) as refused:
        refusing.add(bad)
    assert (refused.value.code, refused.value.field) == (code, field)
    assert idle(refusing)


@pytest.fixture(scope="module")
def refusing() -> Engine:
    return engine()


def test_a_prompt_larger_than_the_pool_is_told_the_limit() -> None:
    with pytest.raises(RequestRefused, match="has 200 tokens; this worker takes at most 127"):
        engine().add(request("r", 200))
    with pytest.raises(RequestRefused, match="at most 31"):
        engine(max_model_len=32).add(request("r", 40))


def test_two_requests_of_one_id_and_too_many() -> None:
    made = engine(max_running=1, max_waiting=2)
    made.add(request("a", 3))
    with pytest.raises(RequestRefused, match="'a' is already running"):
        made.add(request("a", 3))
    made.add(request("b", 3))
    made.add(request("c", 3))
    with pytest.raises(RequestRefused) as refused:
        made.add(request("d", 3))
    assert refused.value.code == "overloaded" and refused.value.retry_after == 1.0
    assert made.stats().refused == {"max_waiting": 1}


def test_whose_deadline_passes_while_it_waits_never_runs() -> None:
    now = [100.0]
    made = Engine(
        EngineConfig(num_blocks=8, max_running=1, vocab_size=258),
        model=tiny(tiny_llama_config(), attn=NAME),
        clock=lambda: now[0],
    )
    made.add(request("runs", 5, replace(GREEDY, max_tokens=20)))
    made.add(request("late", 5, priority=0, slo=Objectives(deadline=101.0)))
    made.add(
        request("patient", 5, replace(GREEDY, max_tokens=2), slo=Objectives(deadline=101.0, serve_late=True))
    )
    made.step()
    now[0] = 101.0
    ended = [p.seq for p in made.step() if p.seq.reason == "error"]
    assert [(s.id, s.reason, s.code) for s in ended] == [("late", "error", "deadline_exceeded")]
    assert ended[0].timeline.scheduled is None and "late" not in made.seqs
    while made.has_work():
        made.step()
    assert idle(made)


def test_what_the_scheduler_did_is_recorded_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "record.csv"
    made = engine(record=str(path))
    made.warm_up()
    made.generate(
        [request("a", 20, replace(GREEDY, max_tokens=4)), request("b", 5, replace(GREEDY, max_tokens=6))]
    )
    made.save_record()
    spans = {(s.request, s.state): s.tokens for s in read_record(path)}
    assert {request for request, _ in spans} == {"a", "b"}, "the warm-up is in the record"
    assert spans[("a", "prefill")] == 20 and spans[("a", "decode")] == 3
    assert spans[("b", "prefill")] == 5 and spans[("b", "decode")] == 5
    made.record = tmp_path / "missing" / "record.csv"
    made.save_record()
    assert engine().recorder is None


def test_sequences_that_exhaust_the_pool_end_and_the_others_go_on() -> None:
    """nano-vllm#274: without max_tokens each would take the whole pool."""
    made = engine(max_running=4)
    requests = [request(f"r{i}", 3 + i) for i in range(5)]
    together = made.generate(requests)
    assert made.scheduler.preemptions > 0
    assert {name: len(tokens) for name, tokens in together.items()} == {f"r{i}": 125 - i for i in range(5)}
    assert idle(made)
    for r in requests:
        assert together[r.request_id] == engine().generate([r])[r.request_id]


def test_a_sequence_as_long_as_the_pool_with_others_behind_it() -> None:
    made = engine()
    done = made.generate(
        [request("long", 127), request("short", 5, replace(GREEDY, max_tokens=3)), request("full", 60)]
    )
    assert {name: len(tokens) for name, tokens in done.items()} == {"long": 1, "short": 3, "full": 68}
    assert idle(made)


@pytest.mark.parametrize("steps", [0, 1, 2, 6, 40])
def test_cancelled_in_every_state(steps: int) -> None:
    made = engine(num_blocks=6, token_budget=20)
    for i in range(6):
        made.add(request(f"r{i}", 5 + 10 * i, replace(GREEDY, max_tokens=30)))
    for _ in range(steps):
        made.step()
    states = {seq.status for seq in made.seqs.values()}
    for name in list(made.seqs):
        seq = made.cancel(name)
        assert seq.reason == "cancelled" and seq.status is Status.FINISHED
        assert made.cancel(name) is None
    assert idle(made) and (steps == 0 or Status.RUNNING in states)
    assert len(made.generate([request("after", 3, replace(GREEDY, max_tokens=4))])["after"]) == 4


def mixed(max_tokens: int = 40) -> list[GenerationRequest]:
    kinds = [
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=2.0, top_p=0.9),
        SamplingParams(seed=3, top_k=9, repetition_penalty=1.2),
        SamplingParams(seed=4, min_p=0.02, presence_penalty=0.4, ignore_eos=True),
    ]
    return [
        request(f"m{i}", 1 + 7 * i, replace(kinds[i % 5], max_tokens=max_tokens), priority=i % 3)
        for i in range(10)
    ]


def test_same_seed_same_tokens_whatever_else_runs() -> None:
    """vllm#51226, nano-vllm#211: alone, and together in a pool so small that they are preempted."""
    alone = {r.request_id: engine().generate([r])[r.request_id] for r in mixed()}
    for config in ({}, {"max_running": 10, "token_budget": 30}, {"policy": "fcfs", "max_preemptions": 0}):
        made = engine(**config)
        assert made.generate(mixed()) == alone
        assert idle(made)
    made = engine(max_running=10)
    made.generate(mixed())
    assert made.scheduler.preemptions > 0


@pytest.mark.parametrize("cut", [1, 13, 39, 40])
def test_a_continuation_is_what_the_uninterrupted_run_would_have_been(cut: int) -> None:
    whole = engine().generate(mixed())
    parts = [replace(r, output_token_ids=whole[r.request_id][:cut]) for r in mixed()]
    assert engine().generate(parts) == whole


def test_an_output_that_is_complete_needs_no_iteration() -> None:
    made = engine()
    long, stop = [1] * 40, SamplingParams(stop_token_ids=(77,), max_tokens=50)
    cases = {
        "length": request("a", 3, replace(GREEDY, max_tokens=3), output_token_ids=[5, 6, 7]),
        "longer": request("b", 3, replace(GREEDY, max_tokens=2), output_token_ids=[5, 6, 7]),
        "pool": request("c", 100, GREEDY, output_token_ids=long),
        "eos": request("d", 3, SamplingParams(), output_token_ids=[5, EOS]),
        "stop id": request("e", 3, stop, output_token_ids=[77]),
    }
    for name, case in cases.items():
        end = made.add(case)
        assert end and end.token is None and end.seq.status is Status.FINISHED
        assert end.seq.reason == ("stop" if name in ("eos", "stop id") else "length")
        assert made.generate([case]) == {case.request_id: case.output_token_ids}
    assert made.add(request("f", 3, replace(stop, min_tokens=2), output_token_ids=[77])) is None
    made.cancel("f")
    assert made.counters.iterations == 0 and idle(made)


def test_min_tokens_come_before_eos_and_stop_ids() -> None:
    """vllm#46243: the bias makes both likelier than anything else."""
    eager = SamplingParams(
        temperature=0.0, min_tokens=6, max_tokens=20, stop_token_ids=(9,), logit_bias={EOS: 90.0, 9: 80.0}
    )
    done = engine().generate(
        [
            request("a", 3, eager),
            request("b", 3, replace(eager, min_tokens=0)),
            request("c", 3, replace(eager, logit_bias={9: 80.0})),
            request("d", 3, replace(eager, ignore_eos=True, stop_token_ids=())),
        ]
    )
    assert len(done["a"]) == 7 and done["a"][-1] == EOS and not {EOS, 9} & set(done["a"][:-1])
    assert done["b"] == [EOS]
    assert len(done["c"]) == 7 and done["c"][-1] == 9
    assert len(done["d"]) == 20 and done["d"][6:] == [EOS] * 14


def test_a_row_that_is_no_number_ends_that_request_alone() -> None:
    made = engine()
    with torch.inference_mode():
        made.runner.model.get_input_embeddings().weight[50] = math.nan
    done: dict[str, Any] = {}
    sampling = replace(GREEDY, max_tokens=5)
    for r in (request("bad", [50, 1], sampling), request("good", [7, 1], sampling)):
        made.add(r)
    while made.has_work():
        done |= {p.seq.id: p.seq for p in made.step() if p.seq.status is Status.FINISHED}
    assert done["bad"].reason == "error" and "not a number" in done["bad"].message
    assert done["good"].reason == "length"
    clean = engine().generate([request("good", [7, 1], sampling)])["good"]
    assert done["good"].tokens[2:] == clean, "what the other left in memory is read"
    later = request("later", [7] * 100, sampling)
    assert made.generate([later]) == engine().generate([later])


def test_counters_count_each_prompt_token_once() -> None:
    made = engine(token_budget=20)
    made.generate(
        [request("a", 50, replace(GREEDY, max_tokens=3)), request("b", 7, replace(GREEDY, max_tokens=1))]
    )
    stats = made.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.running, stats.waiting) == (57, 4, 0, 0)


def test_out_of_memory_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#15357: at the pool, and at the first iteration."""
    with pytest.raises(
        OutOfMemory, match=r"set kv_cache_bytes to between \d+ and \d+, or num_blocks to at most \d+"
    ):
        engine(num_blocks=10**10)
    with pytest.raises(OutOfMemory, match="kv_cache_bytes"):
        engine(num_blocks=0, kv_cache_bytes=10)
    monkeypatch.setattr(pool, "free_bytes", lambda device: 10)
    with pytest.raises(OutOfMemory, match="does not fit into"):
        engine(num_blocks=0)
    monkeypatch.undo()

    def full(chunks: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    made = engine()
    monkeypatch.setattr(made.runner, "run", full)
    with pytest.raises(
        OutOfMemory, match=r"num_blocks to at most 6 \(now 8\), or token_budget to 128 \(now 256\)"
    ):
        made.warm_up()


@pytest.mark.parametrize("config", [{"max_model_len": 2}, {"max_model_len": 3}, {"num_blocks": 1}, {}])
def test_warm_up_fits_into_any_pool(config: dict[str, Any]) -> None:
    made = engine(**config)
    made.warm_up()
    assert idle(made) and made.stats().iterations == 0


def test_sequences_without_room_for_an_answer_are_refused_at_start() -> None:
    with pytest.raises(ValueError, match="raise max_model_len"):
        engine(max_model_len=1)


@pytest.mark.parametrize(
    "bad", [{"dtype": "int4"}, {"max_running": 0}, {"num_blocks": -1}, {"watermark": 1.0}, {"block_size": 0}]
)
def test_a_wrong_setting_is_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        EngineConfig(**bad)


def test_the_engine_from_a_directory(tmp_path: Path) -> None:
    """The same tokens as the model that was saved, and its end-of-text token."""
    save_tiny_llama(tmp_path)
    made = Engine(
        EngineConfig(model=str(tmp_path), dtype="float32", num_blocks=8, max_running=4, vocab_size=258)
    )
    assert made.eos == {EOS} and made.model.dtype == "float32"
    assert made.generate(mixed()) == engine().generate(mixed())
    assert load(EngineConfig(model=str(tmp_path), dtype="bfloat16")).dtype is torch.bfloat16
    assert pick_dtype("auto", torch.device("cpu")) in (torch.bfloat16, torch.float32)


SCRIPT = """
from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
import sys

made = Engine(EngineConfig(model=sys.argv[1], dtype="float32", num_blocks=8, max_running=4, vocab_size=258))
print(made.generate([GenerationRequest("a", [1, 2, 3], SamplingParams(max_tokens=9, seed=5, ignore_eos=True))])["a"])
"""


def test_fewer_threads_than_were_asked_for(tmp_path: Path) -> None:
    """OpenMP gives what its limit allows; who waits for more waits for ever."""
    save_tiny_llama(tmp_path)
    environment = os.environ | {"OMP_NUM_THREADS": "4", "OMP_THREAD_LIMIT": "1"}
    command = [sys.executable, "-P", "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    sampling = SamplingParams(max_tokens=9, seed=5, ignore_eos=True)
    assert done.stdout.strip() == str(engine().generate([request("a", [1, 2, 3], sampling)])["a"])


def test_no_request_leaves_garbage_that_only_a_collection_could_free() -> None:
    """The engine's process collects none while it works."""

    def left_by(requests: int) -> int:
        made = engine(num_blocks=12, watermark=0.0)
        gc.collect()
        gc.disable()
        try:
            for number in range(requests):
                # Of different beginnings, and more than the pool holds: pages are kept and given up, some preempted.
                sampling = replace(GREEDY, max_tokens=60, temperature=number % 2, top_k=5)
                made.add(request(f"r{number}", [number, *range(20)], sampling))
                if number % 7 == 0:
                    made.cancel(f"r{number}")
            while made.has_work():
                made.step()
            assert made.scheduler.preemptions > 0
            return gc.collect()
        finally:
            gc.enable()

    left_by(4)
    assert left_by(60) <= left_by(20) + 20
