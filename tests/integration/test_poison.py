"""A request that its engine dies of, through Kafka: a real engine in its own process, and other requests beside it."""

import sys
from pathlib import Path

import pytest

from kafka_broker import KafkaBroker
from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
from plait.schemas import ErrorEvent
from plait.service.local import make_engine
from service_bench import until
from tiny_models import save_tiny_llama
from worker_harness import Message, Site, request
from worker_process import Reading, WorkerProcess

pytestmark = pytest.mark.kafka

POISON = 255
POISON_OFFSET = 4
LENGTH = 40
NAMES = [f"r{i}" for i in range(8)]
CHILD = Path(__file__).parent.parent / "poisoned_child.py"
ENGINE = {"dtype": "float32", "num_blocks": 100, "max_running": 16, "threads": 1}
Messages = list[tuple[bytes, list[tuple[str, bytes]]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[str, list[int]]:
    """What an engine says that nothing kills."""
    engine = Engine(EngineConfig(str(model), **ENGINE, vocab_size=258))
    sampling = [SamplingParams(seed=i, max_tokens=LENGTH, ignore_eos=True) for i in range(len(NAMES))]
    return engine.generate(GenerationRequest(name, [i, 2, 3], sampling[i]) for i, name in enumerate(NAMES))


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """In the place of the interpreter that runs the engine's process."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{CHILD}" "$@"\n')
    script.chmod(0o755)
    return script


def asked(topic: str) -> tuple[Messages, bytes]:
    """All requests, the deadly one in their middle; and its bytes."""
    sampling = {"max_tokens": LENGTH, "ignore_eos": True}
    messages = [
        request(
            name,
            prompt=None,
            prompt_token_ids=[i, 2, 3],
            response_topic=topic,
            sampling=sampling | {"seed": i},
        )
        for i, name in enumerate(NAMES)
    ]
    poison = request("poison", prompt=None, prompt_token_ids=[9, POISON, 9], response_topic=topic)
    return [*messages[:POISON_OFFSET], poison, *messages[POISON_OFFSET:]], poison[0]


async def assert_found(
    site: Site, answers: dict[str, list[Message]], poison: bytes, reason: str, wanted: dict[str, list[int]]
) -> None:
    """One dead letter, byte for byte; one event, which says why; and all others are answered in full."""
    (error,) = [message.event() for message in answers.pop("poison")]
    assert isinstance(error, ErrorEvent) and error.code == "internal" and not error.retryable
    assert reason in error.message
    (letter,) = await site.read([site.topics.dlq], lambda found: found)
    assert letter.value == poison and reason in (dict(letter.headers)["plait-dlq-reason"] or b"").decode()
    assert set(answers) == set(NAMES)
    for name, messages in answers.items():
        reading = Reading(messages)
        assert reading.tokens == wanted[name] and [end.type for end in reading.ends] == ["done"], name
    assert sum((await site.committed()).values()) == len(NAMES) + 1


async def test_a_request_that_takes_the_engine_down(
    kafka: KafkaBroker,
    model: Path,
    python: Path,
    wanted: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second time it is found; the engine comes back once more, for the others."""
    monkeypatch.setenv("POISON", str(POISON))
    monkeypatch.setattr(sys, "executable", str(python))
    site = Site(kafka.bootstrap_servers, partitions=1)
    site.configure(engine={"model": str(model), **ENGINE})
    topic = f"{site.name}.answers"
    messages, poison = asked(topic)
    engine = make_engine(site.settings)
    async with site.worker(engine):
        await site.produce(messages)
        answers = await site.answers([topic], len(NAMES) + 1)
    assert engine.restarts == 2
    await assert_found(site, answers, poison, "the engine process died 2 times", wanted)


async def test_deaths_of_the_engine_are_counted_across_workers(
    kafka: KafkaBroker, model: Path, python: Path, tmp_path: Path, wanted: dict[str, list[int]]
) -> None:
    """Each of two workers is killed after its engine has died: the third one does not try again."""
    fast = {"session_timeout_ms": 3000, "heartbeat_interval_ms": 300}
    site = Site(kafka.bootstrap_servers, partitions=1, kafka=fast)
    site.configure(engine={"model": str(model), **ENGINE})
    topic, hold = f"{site.name}.answers", tmp_path / "hold"
    messages, poison = asked(topic)
    deadly = {"ENGINE_PYTHON": str(python), "POISON": str(POISON), "POISON_HOLD": str(hold)}
    workers = []
    for death in range(2):
        workers.append(await WorkerProcess(site, tmp_path, None, **deadly).start())
        if not death:
            await site.produce(messages)
        log = workers[-1].log
        await until(lambda log=log: "the engine process ended" in log.read_text(), seconds=60)
        await site.marked(POISON_OFFSET, death + 1)
        await workers[-1].kill()
        hold.unlink()
    workers.append(await WorkerProcess(site, tmp_path, None, **deadly).start())
    answers = await site.answers([topic], len(NAMES) + 1)
    await workers[-1].stop()
    deaths = [worker.log.read_text().count("the engine process ended") for worker in workers]
    assert deaths == [1, 1, 0]
    await assert_found(site, answers, poison, "2 workers died", wanted)
