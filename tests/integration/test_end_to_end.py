"""The main job, whole: a foreign producer, Apache Kafka, the real model in its own process, and back."""

import os
import signal

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kafka_broker import KafkaBroker
from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
from plait.engine.models import resolve
from plait.engine.process import EngineProcess
from plait.engine.tokenizer import Tokenizer
from worker_harness import Site, assert_answered_once, request

pytestmark = [pytest.mark.kafka, pytest.mark.model]

# Greedy texts can be compared in float32 only; the pool is small, so that some requests are preempted.
CONFIG = EngineConfig(dtype="float32", max_running=32, num_blocks=24)
PROMPTS = [
    "The sea was",
    "Once upon a time there was a king who",
    "A list of three fruits:",
    "def add(a, b):",
    "In the year 1905 a young clerk in Bern",
]


def sampling(i: int) -> dict[str, object]:
    if i % 4 == 3:
        return {"max_tokens": 10, "temperature": 0.8, "seed": i, "ignore_eos": True}
    return {"max_tokens": 6 + i % 30, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """What one engine generates for each request, undisturbed."""
    tokenizer = Tokenizer(resolve("smollm2"))
    engine = Engine(EngineConfig(dtype="float32", max_running=32))
    requests = [
        GenerationRequest(str(i), tokenizer.encode(PROMPTS[i % 5]), SamplingParams(**sampling(i)))
        for i in range(200)
    ]
    done = engine.generate(requests)
    return [done[str(i)] for i in range(200)]


async def serve(site: Site, count: int, provider: TracerProvider | None = None, kill: bool = False):
    """Produce `count` requests and read their answers; with `kill`, the engine dies in the middle of them."""
    shared = f"{site.name}.shared"
    topics, messages = set(), []
    for i in range(count):
        fields = {"response_topic": shared} if i % 2 else {}
        topics.add(shared if i % 2 else site.response_topic(f"r{i}"))
        value, headers = request(
            f"r{i}", "json" if i % 3 else "msgpack", prompt=PROMPTS[i % 5], sampling=sampling(i), **fields
        )
        messages.append((value, [*headers, ("traceparent", f"00-{i + 1:032x}-{i + 1:016x}-01".encode())]))
    engine = EngineProcess(CONFIG)
    async with site.worker(engine, provider):
        await site.produce(messages)
        if kill:
            await site.read([shared], lambda found: len(found) > count)
            assert engine.live, "it dies while it generates"
            os.kill(engine._child.pid, signal.SIGKILL)
        answers = await site.answers(topics, count, seconds=120)
    return answers, engine


def assert_right(answers, wanted: list[list[int]], count: int) -> None:
    assert len(answers) == count
    for i in range(count):
        events = [m.event() for m in answers[f"r{i}"]]
        done = assert_answered_once(answers[f"r{i}"])
        assert done.type == "done" and done.finish_reason == "length"
        tokens = [token for e in events[:-1] for token in e.token_ids]
        assert tokens == wanted[i], f"r{i}"
        assert done.usage.completion_tokens == len(tokens)


@pytest.mark.timeout(300)
async def test_two_hundred_requests_with_the_real_model(kafka: KafkaBroker, wanted: list[list[int]]) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    answers, engine = await serve(Site(kafka.bootstrap_servers), 200, provider)
    assert_right(answers, wanted, 200)
    assert engine.stats.preemptions > 0, "the pool was small enough for this test to mean something"
    traces = {span.context.trace_id for span in exporter.get_finished_spans()}
    assert traces == set(range(1, 201))
    for i in range(200):
        for message in answers[f"r{i}"]:
            parent = dict(message.headers)["traceparent"].decode()
            assert parent.split("-")[1] == f"{i + 1:032x}", "the trace goes on to the last event"


@pytest.mark.timeout(300)
async def test_the_engine_is_killed_while_it_generates(kafka: KafkaBroker, wanted: list[list[int]]) -> None:
    answers, engine = await serve(Site(kafka.bootstrap_servers), 40, kill=True)
    assert engine.restarts == 1
    assert_right(answers, wanted, 40)
