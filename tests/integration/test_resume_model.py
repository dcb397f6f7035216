"""A real model: answers that went from worker to worker are those of a worker that was left alone."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import kill_rounds
from kafka_broker import KafkaBroker
from kill_loads import ModelLoad
from plait.engine.config import EngineConfig
from plait.engine.process import EngineProcess
from plait.schemas import TokensEvent
from tiny_models import save_tiny_llama
from worker_harness import Message, Site, request

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1, "logprobs": 2},
    {"seed": 2, "n": 3},
    {"seed": 3, "stop": ["q", "zz"], "ignore_eos": True},
    {"seed": 4, "temperature": 3.0, "min_tokens": 60, "stop": ["a"]},
    {"seed": 5, "repetition_penalty": 1.3, "skip_special_tokens": False},
    {"seed": 6, "temperature": 0.5, "stop": ["xyz"], "include_stop_str_in_output": True, "ignore_eos": True},
]
COUNT = 14


def requests(topic: str) -> list[tuple[bytes, Any]]:
    return [
        request(
            f"r{i}",
            "json" if i % 2 else "msgpack",
            prompt=f"prompt number {i}:",
            sampling={"max_tokens": 300} | KINDS[i % len(KINDS)],
            response_topic=topic,
            stream=i % 5 != 4,
        )
        for i in range(COUNT)
    ]


def whole(messages: list[Message]) -> tuple[Any, ...]:
    """Tokens and text of each choice, and how they ended."""
    *pieces, done = [m.event() for m in messages]
    assert [e.index for e in pieces] == list(range(len(pieces))) and done.index == len(pieces)
    assert done.type == "done"
    ids: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    for event in pieces:
        assert isinstance(event, TokensEvent)
        ids.setdefault(event.choice, []).extend(event.token_ids)
        texts[event.choice] = texts.get(event.choice, "") + event.text
    if not pieces:
        ids, texts = {0: done.token_ids or []}, dict(enumerate(done.texts or [done.text or ""]))
    return ids, texts, done.finish_reasons, done.usage.completion_tokens


@pytest.mark.kafka
async def test_answers_that_went_through_three_workers(kafka: KafkaBroker, tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "tiny", num_hidden_layers=8)
    # One for all workers: what they hand over is cancelled there, and submitted anew with what was published.
    engine = EngineProcess(
        EngineConfig(str(model), dtype="float32", num_blocks=400, max_running=40, threads=1)
    )
    await engine.start()
    calm, site = (Site(kafka.bootstrap_servers, worker={"drain_seconds": 0}) for _ in range(2))
    topic = f"{site.name}.answers"
    await site.create(topic, 3)
    try:
        async with calm.worker(engine):
            await calm.produce(requests(f"{calm.name}.answers"))
            wanted = await calm.answers([f"{calm.name}.answers"], COUNT)
        for least in (200, 1500):
            async with site.worker(engine):
                if least == 200:
                    await site.produce(requests(topic))

                def enough(found: list[Message], least: int = least) -> bool:
                    if len(found) > least:
                        # Or it is done before the worker has stopped.
                        os.kill(engine._child.pid, signal.SIGSTOP)
                    return len(found) > least

                await site.read([topic], enough, grace=0)
            os.kill(engine._child.pid, signal.SIGCONT)
        async with site.worker(engine):
            answers = await site.answers([topic], COUNT)
    finally:
        await engine.stop()
    epochs = {name: {m.event().epoch for m in messages} for name, messages in answers.items()}
    assert sum(len(found) == 3 for found in epochs.values()) > 2, "many went through all three"
    for i in range(COUNT):
        assert whole(answers[f"r{i}"]) == whole(wanted[f"r{i}"]), f"r{i}"


@pytest.mark.kafka
@pytest.mark.model
async def test_a_worker_with_the_bundled_model_is_killed(kafka: KafkaBroker, tmp_path: Path) -> None:
    """kill -9 in the middle of its streams: the next one's greedy answers are those of an engine left alone."""
    load = ModelLoad(streams=10)
    result = await kill_rounds.run(kafka.bootstrap_servers, tmp_path, 1, load=load)
    assert (result.missing, result.duplicated, result.unanswered, result.different) == (0, 0, 0, 0)
    assert result.second_ends == 0 and result.repeated == 0, "read back, not run again"
    assert result.midstream >= 5
