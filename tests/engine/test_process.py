"""The engine in its own process: whatever happens to it, every request ends once, with the same tokens and text."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM, FalconConfig

from engine_runs import Run, finished
from plait.engine import process
from plait.engine.api import GenerationRequest, Objectives, Output, RequestRefused, SamplingParams
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
from plait.engine.process import EngineFailed, EngineProcess
from plait.engine.text import TextStream
from tiny_models import EOS, byte_tokenizer, save_tiny_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")
TESTS = Path(__file__).parent.parent
(COLON,) = byte_tokenizer().encode(":").ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def config_of(model: Path, **changes: object) -> EngineConfig:
    fields = {"dtype": "float32", "num_blocks": 33, "max_running": 6, "token_budget": 32, "threads": 1}
    return EngineConfig(model=str(model), **fields | changes)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[EngineProcess]:
    """One for most tests: what they do to it, it has to survive."""
    made = EngineProcess(config_of(model))
    await made.start()
    yield made
    await made.stop()


def requests(tag: str, max_tokens: int = 60) -> list[GenerationRequest]:
    """More than run at once, in a pool that is too small for all of them."""
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1, temperature=0.8),
        SamplingParams(seed=2, top_k=20, frequency_penalty=0.5),
        SamplingParams(seed=3, top_p=0.9, stop=("q", "zz")),
        SamplingParams(seed=4, min_p=0.02, ignore_eos=True),
        SamplingParams(seed=5, temperature=3.0, min_tokens=50, stop=("a",)),
        SamplingParams(seed=6, repetition_penalty=1.3, skip_special_tokens=False),
    ]
    return [
        GenerationRequest(
            f"{tag}-{i}",
            # A whole character at the end, or the first bytes that follow would belong to it.
            [*((7 * i + j) % 256 for j in range(11 * i)), COLON],
            replace(kinds[i % len(kinds)], max_tokens=max_tokens),
            priority=i % 10,
        )
        for i in range(12)
    ]


async def undisturbed(engine: EngineProcess) -> list[tuple[list[int], str, str | None]]:
    runs = [Run(engine, r) for r in requests("calm")]
    await finished(*runs)
    return [run.seen for run in runs]


async def until(condition: Callable[[], object], seconds: int = 60) -> None:
    for _ in range(seconds * 100):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not happen")


def is_gone(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def kill(engine: EngineProcess, with_signal: int = signal.SIGKILL) -> None:
    os.kill(engine._child.pid, with_signal)


async def test_tokens_text_and_ends(engine: EngineProcess, model: Path) -> None:
    runs = [Run(engine, r) for r in requests("plain")]
    finishes = await finished(*runs)
    alone = Engine(config_of(model, vocab_size=258)).generate(
        replace(r, sampling=replace(r.sampling, stop=())) for r in requests("plain")
    )
    decode = engine.tokenizer.decode
    for run, finish in zip(runs, finishes, strict=True):
        sampling, expected = run.request.sampling, alone[run.request.request_id]
        assert run.tokens == expected[: len(run.tokens)]
        assert finish.completion_tokens == len(run.tokens)
        assert finish.prompt_tokens == len(run.request.prompt_token_ids)
        if not sampling.stop:
            assert run.tokens == expected
            shown = run.tokens[:-1] if finish.reason == "stop" else run.tokens
            text = decode(shown, skip_special_tokens=sampling.skip_special_tokens)
            assert run.text == text.rstrip("\N{REPLACEMENT CHARACTER}")
        elif finish.reason == "stop" and run.tokens[-1] != EOS:
            assert not any(stop in run.text[50:] for stop in sampling.stop)
        t = finish.timeline
        assert t.arrived <= t.scheduled <= t.first_token <= t.finished
    assert {f.reason for f in finishes} == {"stop", "length"}
    assert engine.stats.preemptions > 0, "the pool was to be too small"
    await until(lambda: engine.stats.running == 0)
    assert engine.stats.free_blocks == engine.stats.total_blocks == 33


async def test_tokens_found_in_the_prefix_cache_are_reported(engine: EngineProcess) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=3)
    prompt = [200 - i for i in range(40)]
    seen = []
    for name, tenant in (("one", "a"), ("two", "a"), ("three", "b")):
        (finish,) = await finished(Run(engine, GenerationRequest(name, prompt, sampling, tenant=tenant)))
        seen.append(finish.cached_tokens)
    assert seen == [0, 32, 0]
    assert engine.stats.prefix_hit_tokens >= 32


async def test_ids_without_a_token_are_never_generated(engine: EngineProcess) -> None:
    """vllm#44744: the model's output has 320 columns, the tokenizer 258 tokens."""
    assert engine.model.vocab_size == 258
    hot = SamplingParams(temperature=50.0, max_tokens=100, ignore_eos=True)
    runs = [Run(engine, GenerationRequest(f"hot-{i}", [1], replace(hot, seed=i))) for i in range(4)]
    await finished(*runs)
    tokens = {token for run in runs for token in run.tokens}
    assert max(tokens) < 258 and len(tokens) > 100


@pytest.mark.parametrize("at", [1, 25])
async def test_killed_during_generation(engine: EngineProcess, at: int) -> None:
    expected = await undisturbed(engine)
    before = engine.restarts
    batch = requests(f"killed-{at}")
    runs = [
        Run(engine, r, (lambda n: n == at and kill(engine)) if i == 4 else None) for i, r in enumerate(batch)
    ]
    finishes = await finished(*runs)
    assert engine.restarts == before + 1 == engine.stats.restarts
    assert [run.seen for run in runs] == expected
    assert any(len(f.timeline.restarts) == 1 for f in finishes)
    assert all(f.code is None for f in finishes)


async def test_killed_again_while_it_comes_back(engine: EngineProcess) -> None:
    expected = await undisturbed(engine)
    runs = [Run(engine, r) for r in requests("twice")]
    pid = engine._child.pid
    kill(engine)
    await until(lambda: engine._child.pid != pid)
    kill(engine)
    await finished(*runs)
    assert [run.seen for run in runs] == expected


async def test_what_comes_while_the_engine_is_down_waits_for_it(engine: EngineProcess) -> None:
    expected = await undisturbed(engine)
    kill(engine)
    await until(lambda: not engine.ready)
    runs = [Run(engine, r) for r in requests("down")]
    gone = Run(engine, GenerationRequest("down-cancelled", [1]))
    engine.cancel("down-cancelled")
    assert gone.done.result().reason == "cancelled", "while it is down nobody else can say so"
    await finished(*runs)
    assert [run.seen for run in runs] == expected


async def test_cancelled_after_the_crash_but_before_it_is_noticed(engine: EngineProcess) -> None:
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    runs: list[Run] = []

    def strike(n: int) -> None:
        if n == 5:
            kill(engine)
            while not is_gone(engine._child.pid):
                time.sleep(0.001)
            engine.cancel("crossed-0")

    for i in range(2):
        runs.append(Run(engine, GenerationRequest(f"crossed-{i}", [i], long), strike if i == 0 else None))
    finishes = await finished(*runs)
    assert [f.reason for f in finishes] == ["cancelled", "length"]
    assert len(runs[0].tokens) < 400 and len(runs[1].tokens) == 400


async def test_cancelled_in_every_state(engine: EngineProcess) -> None:
    """vllm#52969"""
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    engine.cancel("never heard of")
    runs = [Run(engine, GenerationRequest(f"state-{i}", [i], long)) for i in range(9)]
    engine.cancel("state-0")
    await until(lambda: any(run.tokens for run in runs[1:]))
    running = next(run for run in runs[1:] if run.tokens)
    waiting = next(run for run in runs[1:] if not run.tokens)
    for run in (waiting, running):
        engine.cancel(run.request.request_id)
        engine.cancel(run.request.request_id)
    await finished(runs[0], waiting, running)
    assert {run.done.result().reason for run in (runs[0], waiting, running)} == {"cancelled"}
    assert waiting.tokens == [] and 0 < len(running.tokens) < 400
    assert running.done.result().completion_tokens == len(running.tokens)
    for run in runs:
        engine.cancel(run.request.request_id)
    await finished(*runs)
    engine.cancel("state-0")
    assert not engine.live
    await until(lambda: engine.stats.running == engine.stats.waiting == 0)
    assert engine.stats.free_blocks == engine.stats.total_blocks


async def test_a_silent_engine_is_killed_and_replaced(engine: EngineProcess) -> None:
    expected = await undisturbed(engine)
    engine.config = replace(engine.config, stall_seconds=2)
    try:
        runs = [Run(engine, r) for r in requests("silent")]
        await until(lambda: any(run.tokens for run in runs))
        before = engine.restarts
        kill(engine, signal.SIGSTOP)
        await until(lambda: engine.restarts == before + 1)
    finally:
        engine.config = replace(engine.config, stall_seconds=120)
    await finished(*runs)
    assert [run.seen for run in runs] == expected


async def test_the_heartbeat_goes_on_while_idle(engine: EngineProcess) -> None:
    assert not engine.live
    seen = engine.heartbeat
    await until(lambda: engine.heartbeat > seen)


async def test_refusals(engine: EngineProcess) -> None:
    run = Run(engine, GenerationRequest("one", [1], SamplingParams(max_tokens=100, ignore_eos=True)))
    with pytest.raises(RequestRefused, match="'one' is in flight") as refused:
        Run(engine, GenerationRequest("one", [1]))
    assert (refused.value.code, refused.value.field) == ("invalid_request", "request_id")
    with pytest.raises(RequestRefused, match="at most 511") as refused:
        Run(engine, GenerationRequest("two", [1] * 512))
    assert refused.value.code == "prompt_too_long"
    engine.config = replace(engine.config, max_running=1, max_waiting=1)
    try:
        other = Run(engine, GenerationRequest("three", [1], SamplingParams(max_tokens=3)))
        with pytest.raises(RequestRefused, match="2 requests are in flight") as refused:
            Run(engine, GenerationRequest("four", [1]))
        assert refused.value.code == "overloaded" and refused.value.retry_after == 1.0
    finally:
        engine.config = replace(engine.config, max_running=6, max_waiting=10_000)
    await finished(run, other)
    assert run.done.result().reason == "length" and not engine.live


async def test_a_resumed_sequence_tells_what_was_not_told(engine: EngineProcess) -> None:
    whole = [Run(engine, r) for r in requests("told")]
    await finished(*whole)
    for run in whole:
        request, (ids, text, reason) = run.request, run.seen
        cut = len(ids) // 2
        before = engine.told(replace(request, output_token_ids=ids[:cut]))
        again = Run(engine, replace(request, request_id=f"{request.request_id}+", output_token_ids=ids[:cut]))
        await finished(again)
        assert (ids[:cut] + again.seen[0], before.text + again.seen[1], again.seen[2]) == (ids, text, reason)
        assert not engine.begun(request.request_id)


async def test_what_the_engine_refuses_comes_back_with_its_reason(engine: EngineProcess) -> None:
    """Over the link: a deadline that is over when the request arrives there, and an objective out of reach."""
    past = time.monotonic() - 1.0
    runs = [Run(engine, r) for r in requests("warm")]
    await finished(*runs)
    prompt = [1] * 400
    hasty = Run(
        engine, GenerationRequest("hasty", prompt, slo=Objectives(first_token=time.monotonic() + 1e-4))
    )
    late = Run(engine, GenerationRequest("late", prompt, slo=Objectives(deadline=past)))
    refused, expired = await finished(hasty, late)
    assert (refused.reason, refused.code) == ("error", "overloaded")
    assert refused.message.startswith("slo.ttft_ms") and refused.retry_after > 0
    assert (expired.reason, expired.code) == ("error", "deadline_exceeded")
    assert expired.message.startswith("slo.deadline_ms") and not hasty.tokens and not late.tokens
    await until(lambda: sum(engine.stats.refused.values()) >= 1)


async def test_a_receiver_that_fails_harms_nobody(engine: EngineProcess) -> None:
    def broken(output: Output) -> None:
        raise ZeroDivisionError

    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.submit(GenerationRequest("broken", [1], sampling), broken)
    run = Run(engine, GenerationRequest("whole", [1], sampling))
    await finished(run)
    await until(lambda: not engine.live)
    engine.submit(GenerationRequest("broken", [1], sampling), broken)
    engine.cancel("broken")
    await until(lambda: not engine.live)
    assert engine.ready


async def test_text_that_cannot_be_made_is_an_error_of_that_request(engine: EngineProcess) -> None:
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    run = Run(engine, GenerationRequest("unwritable", [1], sampling))
    other = Run(engine, GenerationRequest("written", [1], sampling))
    engine.live["unwritable"].text.pieces = SimpleNamespace(push=lambda token: 1 / 0)
    await finished(run, other)
    assert (run.done.result().reason, run.done.result().code) == ("error", "internal")
    assert len(other.tokens) == 30


@pytest.mark.parametrize("cut", [1, 17, 59])
async def test_resumed_from_what_an_earlier_run_generated(engine: EngineProcess, cut: int) -> None:
    expected = await undisturbed(engine)
    runs = []
    for request, (tokens, _, _) in zip(requests(f"resumed-{cut}"), expected, strict=True):
        runs.append(Run(engine, replace(request, output_token_ids=tokens[:cut])))
    finishes = await finished(*runs)
    for run, (tokens, text, reason), finish in zip(runs, expected, finishes, strict=True):
        assert run.request.output_token_ids + run.tokens == tokens
        stream = TextStream(engine.tokenizer, run.request.sampling, run.request.prompt_token_ids)
        told = "".join(map(stream.push, tokens[:cut]))
        assert len(tokens) <= cut or told + run.text == text
        assert finish.reason == reason
        assert finish.completion_tokens == len(tokens)


async def test_resumed_when_all_is_there_already(engine: EngineProcess) -> None:
    expected = await undisturbed(engine)
    runs = []
    for request, (tokens, _, _) in zip(requests("complete"), expected, strict=True):
        runs.append(Run(engine, replace(request, output_token_ids=tokens)))
    finishes = await finished(*runs)
    for run, (_, _, reason), finish in zip(runs, expected, finishes, strict=True):
        assert run.tokens == [] and run.text == "" and finish.reason == reason


async def test_stopping_with_live_requests(model: Path) -> None:
    engine = EngineProcess(config_of(model))
    await engine.start()
    run = Run(engine, GenerationRequest("left", [1], SamplingParams(max_tokens=500, ignore_eos=True)))
    await until(lambda: run.tokens)
    await engine.stop()
    heard = len(run.tokens)
    assert engine._child.returncode is not None and not engine.ready
    await asyncio.sleep(0.1)
    assert not run.done.done() and len(run.tokens) == heard
    with pytest.raises(RequestRefused, match="not running"):
        Run(engine, GenerationRequest("late", [1]))
    await engine.stop()


async def test_stopping_one_that_never_started(model: Path) -> None:
    engine = EngineProcess(config_of(model))
    await engine.stop()
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine._child)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engine._child.returncode is not None, "the process is left behind"
    await engine.stop()


async def test_what_it_cannot_load_it_says(tmp_path: Path) -> None:
    config = FalconConfig(vocab_size=300, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = EngineProcess(config_of(tmp_path))
    with pytest.raises(EngineFailed, match=r"tokenizer of .* cannot be loaded"):
        await engine.start()
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(EngineFailed, match="does not go through transformers' AttentionInterface"):
        await engine.start()
    await engine.stop()


async def test_a_pool_that_does_not_fit_names_the_setting(model: Path) -> None:
    """vllm#15357"""
    engine = EngineProcess(config_of(model, num_blocks=10**9))
    with pytest.raises(
        EngineFailed, match=r"set kv_cache_bytes to between \d+ and \d+, or num_blocks to at most"
    ):
        await engine.start()


async def test_an_engine_that_cannot_be_brought_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "START_ATTEMPTS", 1)
    folder = shutil.copytree(model, tmp_path / "model")
    engine = EngineProcess(config_of(folder))
    await engine.start()
    runs = [Run(engine, r) for r in requests("lost", max_tokens=380)]
    await until(lambda: any(run.tokens for run in runs))
    (folder / "model.safetensors").unlink()
    kill(engine)
    finishes = await finished(*runs)
    ended = [f for f in finishes if f.reason == "error"]
    assert ended and all(f.code == "internal" and "cannot be brought back" in f.message for f in ended)
    await asyncio.wait([engine.failed], timeout=60)
    assert isinstance(engine.failed.exception(), EngineFailed)
    with pytest.raises(RequestRefused, match="not running"):
        Run(engine, GenerationRequest("late", [1]))
    await engine.stop()


async def test_a_request_that_kills_the_engine_takes_no_other_with_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{TESTS / "poisoned_child.py"}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("POISON", "255")
    good = [GenerationRequest(f"g{i}", [i, 2, 3], SamplingParams(seed=i, max_tokens=30)) for i in range(5)]
    clean = Engine(config_of(model, vocab_size=258)).generate(replace(r) for r in good)
    monkeypatch.setattr(sys, "executable", str(python))
    engine = EngineProcess(config_of(model, max_restarts=1, max_running=8))
    await engine.start()
    poison = Run(
        engine, GenerationRequest("poison", [9, 255, 9], SamplingParams(max_tokens=50, ignore_eos=True))
    )
    runs = [Run(engine, r) for r in good]
    finishes = await finished(poison, *runs)
    assert (finishes[0].reason, finishes[0].code) == ("error", "poison")
    assert "died 2 times" in finishes[0].message and engine.restarts == 2
    assert {run.request.request_id: run.tokens for run in runs} == clean
    await engine.stop()


PARENT = """
import asyncio, os, sys
from plait.engine.config import EngineConfig
from plait.engine.process import EngineProcess

async def main():
    engine = EngineProcess(EngineConfig(model=sys.argv[1], dtype="float32", num_blocks=8, threads=1))
    await engine.start()
    print(engine._child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_the_engine_does_not_outlive_its_parent(model: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", PARENT, str(model), stdout=subprocess.PIPE
    )
    try:
        child = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    finally:
        parent.kill()
        await parent.wait()
    await until(lambda: is_gone(child))


@pytest.mark.model
async def test_the_bundled_model_killed_during_generation() -> None:
    config = EngineConfig(model="smollm2", dtype="float32", num_blocks=64, max_running=4)
    engine = EngineProcess(config)
    await engine.start()
    encode = engine.tokenizer.encode_chat
    prompts = [
        encode([{"role": "user", "content": f"Tell me about {x}."}]) for x in ("tea", "emoji 🎉", "rain")
    ]

    def batch(tag: str) -> list[GenerationRequest]:
        sampling = [SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(seed=3, max_tokens=24)]
        return [GenerationRequest(f"{tag}{i}", p, sampling[i % 2]) for i, p in enumerate(prompts)]

    calm = [Run(engine, r) for r in batch("calm")]
    await finished(*calm)
    killed = [
        Run(engine, r, lambda n: n == 9 and engine.restarts == 0 and kill(engine)) for r in batch("killed")
    ]
    finishes = await finished(*killed)
    assert engine.restarts == 1 and all(len(f.timeline.restarts) == 1 for f in finishes)
    assert [run.seen for run in killed] == [run.seen for run in calm]
    await engine.stop()
