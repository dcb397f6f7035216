"""Workers that come and go, and a broker that restarts: every request is answered, in order."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeEngine, FakeTokenizer, fake_tokens
from kafka_broker import KafkaBroker
from plait.engine.api import GenerationRequest, SamplingParams
from plait.schemas import TokensEvent
from plait.service.event_order import EventOrder
from service_bench import until
from worker_harness import Message, Site, assert_answered_once, request

pytestmark = pytest.mark.kafka

LENGTH = 40
WORKER = """
import asyncio, sys
from fakes import FakeEngine
from plait.service.settings import Settings
from plait.service.worker import Worker

async def main():
    await Worker(Settings.load(sys.argv[1]), FakeEngine(pace=0.05)).run()

asyncio.run(main())
"""


def requests(site: Site, count: int, start: int = 0) -> list[tuple[bytes, Any]]:
    sampling = {"max_tokens": LENGTH, "seed": 1}
    topic = f"{site.name}.answers"
    return [request(f"r{i}", response_topic=topic, sampling=sampling) for i in range(start, start + count)]


def expected(request_id: str) -> list[int]:
    prompt = FakeTokenizer().encode(f"say {request_id}")
    return fake_tokens(GenerationRequest("", prompt, SamplingParams(max_tokens=LENGTH, seed=1)))


def assert_complete(answers: dict[str, list[Message]], count: int) -> None:
    """A reader that follows the epochs sees each answer whole, in order and once."""
    assert set(answers) == {f"r{i}" for i in range(count)}
    for request_id, messages in answers.items():
        order, tokens, ends = EventOrder(), [], []
        for message in messages:
            for event in order.add(message.event()):
                if isinstance(event, TokensEvent) and not ends:
                    tokens += event.token_ids
                elif not ends:
                    ends.append(event)
        assert [e.type for e in ends] == ["done"], request_id
        assert tokens == expected(request_id), request_id


async def test_workers_join_and_leave(kafka: KafkaBroker) -> None:
    site = Site(kafka.bootstrap_servers)
    first, second = FakeEngine(pace=0.05), FakeEngine(pace=0.02)
    async with site.worker(first) as a:
        await site.produce(requests(site, 60))
        await until(lambda: len(first.submitted) > 40)
        async with site.worker(second) as b:
            await site.produce(requests(site, 40, start=60))
            await until(lambda: len(second.submitted) > 5)
            kept = [p for p in a.intake._partitions.values() if p.epoch > 1]
            assert len(kept) == len(b.intake._partitions) == 2, "the assignment is sticky and even"
        answers = await site.answers([f"{site.name}.answers"], 100)
    assert_complete(answers, 100)
    assert sum((await site.committed()).values()) == 100


async def test_requests_of_partitions_that_stay_are_not_disturbed(kafka: KafkaBroker) -> None:
    site = Site(kafka.bootstrap_servers)
    engine = FakeEngine(pace=0.05)
    async with site.worker(engine) as a:
        await site.produce(requests(site, 20))
        await until(lambda: len(engine.submitted) == 20)
        async with site.worker(FakeEngine(pace=0.05)):
            await until(lambda: len(a.intake._partitions) == 2)
            answers = await site.answers([f"{site.name}.answers"], 20)
            outcomes = a.metrics.requests
            done = outcomes.labels(outcome="done", code="")._value.get()
            revoked = outcomes.labels(outcome="revoked", code="")._value.get()
    assert done + revoked == 20 and len(engine.submitted) == 20
    assert_complete(answers, 20)


async def test_a_killed_worker(kafka: KafkaBroker, tmp_path: Path) -> None:
    site = Site(kafka.bootstrap_servers)
    config = tmp_path / "plait.toml"
    sections = site.settings.model_dump(mode="json", include={"kafka", "topics", "http"}, exclude_none=True)
    config.write_text("".join(toml_section(name, fields) for name, fields in sections.items()))
    tests = str(Path(__file__).parents[1])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{WORKER}", str(config)
    )
    topic = f"{site.name}.answers"
    await site.create(topic, 2)
    try:
        async with asyncio.timeout(60):
            while site.topics.requests not in await site.topic_names():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await site.produce(requests(site, 20))
        await site.read([topic], lambda found: len(found) > 50)
        assert process.returncode is None
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    async with site.worker():
        answers = await site.answers([topic], 20)
    assert_complete(answers, 20)


def toml_section(name: str, fields: dict[str, Any]) -> str:
    def value(v: Any) -> str:
        return str(v).lower() if isinstance(v, bool) else repr(v)

    return f"[{name}]\n" + "".join(f"{key} = {value(v)}\n" for key, v in fields.items())


async def test_a_worker_whose_membership_was_lost(kafka: KafkaBroker) -> None:
    site = Site(kafka.bootstrap_servers)
    engine = FakeEngine(pace=0.02)
    async with site.worker(engine) as worker:
        await site.produce(requests(site, 10))
        await until(lambda: len(engine.submitted) == 10)
        worker.intake._consumer._coordinator.generation += 7  # the next commit or heartbeat is refused
        await until(lambda: not worker.intake.assigned.is_set())
        answers = await site.answers([f"{site.name}.answers"], 10)
        await site.produce(requests(site, 5, start=10))
        answers = await site.answers([f"{site.name}.answers"], 15)
        assert worker.ready.is_set()
    assert_complete(answers, 15)
    assert sum((await site.committed()).values()) == 15


@pytest.mark.parametrize("delivery", ["idempotent", "transactional"])
async def test_an_event_that_the_broker_refuses(kafka: KafkaBroker, delivery: str) -> None:
    site = Site(kafka.bootstrap_servers, partitions=1, worker={"delivery": delivery})
    small = f"{site.name}.small"
    await site.create(small, 1, **{"max.message.bytes": "1200"})
    engine = FakeEngine(pace=0.01, text_per_token="y" * 2000)
    async with site.worker(engine):
        await site.produce([request("big", response_topic=small), *requests(site, 5)])
        answers = await site.answers([small, f"{site.name}.answers"], 6)
        await site.produce([request("more")])
        answers |= await site.answers([site.response_topic("more")], 1)
    error = assert_answered_once(answers["big"])
    assert error.type == "error" and error.code == "internal" and "MessageSizeTooLarge" in error.message
    for name in ("r0", "r4", "more"):
        assert answers[name][-1].event().type == "done", "the others go on with a new producer"
    assert sum((await site.committed()).values()) == 7


async def test_a_response_topic_that_is_deleted_meanwhile(kafka: KafkaBroker) -> None:
    site = Site(kafka.bootstrap_servers, kafka={"request_timeout_ms": 2000})
    engine = FakeEngine(pace=0.1)
    topic = site.response_topic("r")
    async with site.worker(engine):
        await site.produce([request("r", sampling={"max_tokens": 60})])
        await site.read([topic], lambda found: len(found) > 5)
        await site.delete(topic)
        answers = await site.answers([topic], 1)
    events = [m.event() for m in answers["r"]]
    assert events[-1].type == "done"
    indexes = [e.index for e in events]
    assert indexes == list(range(indexes[0], indexes[0] + len(indexes))), "no gap after what was deleted"
    assert sum((await site.committed()).values()) == 1


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_broker_that_restarts(own_kafka: KafkaBroker, how: str) -> None:
    site = Site(own_kafka.bootstrap_servers)
    engine = FakeEngine(pace=0.05)
    async with site.worker(engine) as worker:
        await site.produce(requests(site, 20))
        await until(lambda: len(engine.submitted) == 20 and engine.stats.generated_tokens > 100)
        await asyncio.to_thread(getattr(own_kafka, how))
        await until(lambda: engine.idle)  # generation goes on meanwhile
        await asyncio.to_thread(own_kafka.start)
        answers = await site.answers([f"{site.name}.answers"], 20)
        assert_complete(answers, 20)
        await site.produce(requests(site, 10, start=20))
        answers = await site.answers([f"{site.name}.answers"], 30)
        await site.cancel("r999")
        await until(lambda: worker.cancels.seen("r999"))
        assert worker._failure is None
    assert_complete(answers, 30)
