"""The outbox delivers in order and gives up only on what the broker will never take."""

from typing import Any

import pytest
from aiokafka.errors import (
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NotLeaderForPartitionError,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
)

from fakes import FakeEngine
from plait.schemas import Request, Sampling, encode
from plait.service import publisher as publisher_module
from plait.service.metrics import Metrics
from plait.service.publisher import Outbox, PublishFailed
from plait.service.topics import TopicUnavailable
from service_bench import Bench, FakePublisher, until


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "RETRY_BACKOFF_S", 0.001)


def outbox(fake: FakePublisher, ensured: list[int] | None = None) -> Outbox:
    async def ensure() -> None:
        if ensured is not None:
            ensured.append(1)

    publisher: Any = fake
    return Outbox(publisher, Metrics(), "t", b"k", ensure)


def values(fake: FakePublisher) -> list[bytes | None]:
    return [m.value for m in fake.sent]


async def test_in_order_without_waiting() -> None:
    fake = FakePublisher()
    fake.hold()
    box = outbox(fake)
    for i in range(5):
        await box.put(b"%d" % i, [])
    assert values(fake) == [b"0", b"1", b"2", b"3", b"4"] and box.delivered == 0
    assert fake.held is not None
    for delivery in fake.held:
        delivery.set_result(None)
    await box.flush()
    assert box.delivered == 5


@pytest.mark.parametrize(
    "failure",
    [RequestTimedOutError(), NotLeaderForPartitionError(), ("send", KafkaTimeoutError())],
)
async def test_a_failed_delivery_is_repeated_with_everything_after_it(failure: Any) -> None:
    fake, ensured = FakePublisher(), []
    fake.script = [None, failure, failure]
    box = outbox(fake, ensured)
    for i in range(4):
        await box.put(b"%d" % i, [])
    await box.flush()
    assert box.delivered == 4 and ensured
    # A reader that takes each index once, and only the one it waits for, sees all four in order.
    seen = []
    for value in values(fake):
        if value == b"%d" % len(seen):
            seen.append(value)
    assert seen == [b"0", b"1", b"2", b"3"]


async def test_the_last_event_fails_at_the_flush() -> None:
    fake = FakePublisher()
    fake.script = [None, RequestTimedOutError()]
    box = outbox(fake)
    await box.put(b"0", [])
    await box.put(b"1", [])
    await box.flush()
    assert values(fake) == [b"0", b"1"] and fake.renewed == 1


@pytest.mark.parametrize("error", [MessageSizeTooLargeError(), TopicAuthorizationFailedError()])
async def test_what_the_broker_never_takes_fails(error: Exception) -> None:
    fake = FakePublisher()
    fake.script = [None, error]
    box = outbox(fake)
    await box.put(b"0", [])
    await box.put(b"1", [])
    with pytest.raises(PublishFailed, match=type(error).__name__):
        await box.flush()
    assert box.delivered == 1
    box.discard()
    assert box.delivered == 1
    await box.put(b"instead", [])
    await box.flush()
    assert values(fake) == [b"0", b"instead"]


async def test_a_topic_that_is_gone_for_good_ends_the_retries() -> None:
    fake = FakePublisher()
    fake.script = [NotLeaderForPartitionError()]

    async def ensure() -> None:
        raise TopicUnavailable("gone")

    publisher: Any = fake
    box = Outbox(publisher, Metrics(), "t", b"k", ensure)
    await box.put(b"0", [])
    with pytest.raises(TopicUnavailable):
        await box.flush()


def body(**sampling: Any) -> bytes:
    return encode(Request(request_id="r1", prompt="hello", sampling=Sampling(**sampling)))


async def test_an_event_too_large_for_the_topic_ends_the_response_with_an_error() -> None:
    bench = Bench(FakeEngine(pace=0.001))
    bench.publisher.script = [None, None, MessageSizeTooLargeError()]
    events = await bench.serve(body(max_tokens=50))
    assert [e.index for e in events if e.type == "error"] == [2], "the index of the event that is missing"
    assert events[2].type == "error"
    await until(lambda: bench.engine.idle)
    assert bench.partition.tracker.position == 1 and not bench.dead_letters()


async def test_a_topic_that_takes_nothing_means_dead_letter() -> None:
    bench = Bench(FakeEngine(pace=0.001))
    bench.publisher.script = [TopicAuthorizationFailedError()] * 2
    assert await bench.serve(body(max_tokens=1)) == []
    (letter,) = bench.dead_letters()
    assert letter.value == body(max_tokens=1)
    assert b"TopicAuthorizationFailed" in (dict(letter.headers)["plait-dlq-reason"] or b"")
    assert bench.partition.tracker.position == 1


async def test_the_offset_is_open_until_the_terminal_event_is_durable() -> None:
    bench = Bench()
    bench.publisher.hold()
    stream = bench.start(body())
    await until(lambda: bench.publisher.sent and bench.publisher.sent[-1].event().type == "done")
    assert stream.task is not None and not stream.task.done()
    assert bench.partition.tracker.position == 0 and bench.partition.tracker.unfinished == 1
    assert bench.publisher.held is not None
    for delivery in bench.publisher.held:
        delivery.set_result(None)
    await stream.task
    assert bench.partition.tracker.position == 1


async def test_a_dead_letter_is_repeated_until_it_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.service.dead_letters.RETRY_BACKOFF_S", 0.001)
    bench = Bench()
    bench.publisher.script = [RequestTimedOutError(), ("send", KafkaTimeoutError())]
    await bench.serve(b"nonsense")
    assert [m.value for m in bench.dead_letters()] == [b"nonsense"]
    assert bench.partition.tracker.position == 1


async def test_a_dead_letter_too_large_for_its_topic_goes_without_its_value() -> None:
    bench = Bench()
    bench.publisher.script = [MessageSizeTooLargeError()]
    await bench.serve(b"n" * 5000)
    (letter,) = bench.dead_letters()
    assert letter.value is None
    assert dict(letter.headers)["plait-dlq-value-omitted"] == b"5000"
    assert dict(letter.headers)["plait-dlq-offset"] == b"0"


async def test_tokens_gather_into_one_event_while_the_topic_is_made() -> None:
    bench = Bench()
    bench.topics.answering.clear()
    stream = bench.start(body(max_tokens=100))
    await until(lambda: bench.engine.submitted and bench.engine.idle)
    bench.topics.answering.set()
    assert stream.task is not None
    await stream.task
    first, second, done = bench.events()
    assert first.type == second.type == "tokens" and done.type == "done"
    assert len(first.token_ids) + len(second.token_ids) == 100
