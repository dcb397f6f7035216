"""One request from record to terminal event, with everything around it in memory."""

import asyncio
import json
import math
import time
from typing import Any

import pytest

from fakes import FakeEngine, FakeTokenizer
from plait.schemas import JSON, DoneEvent, ErrorEvent, Request, Sampling, Slo, TokensEvent, encode
from plait.service.admission import seed_of
from plait.service.clock import Clock
from plait.service.settings import Settings
from service_bench import Bench, until


def ids_of(events: list[Any], choice: int = 0) -> list[int]:
    return [token for event in events if event.choice == choice for token in event.token_ids]


def body(request_id: str = "r1", **fields: Any) -> bytes:
    if not {"prompt", "messages", "prompt_token_ids"} & fields.keys():
        fields["prompt"] = "hello world"
    return encode(Request(request_id=request_id, **fields))


def ended_well(bench: Bench) -> None:
    """Nothing is left over, whatever happened."""
    assert bench.engine.idle
    assert not bench.services.streams
    assert not any(bench.publisher.users.values()) and bench.publisher.users.keys() == {
        *bench.sweeper.scheduled
    }
    assert bench.partition.tracker.position == bench.offset, "every offset is done"
    assert not bench.partition.leases
    assert len(bench.spans()["process plait.requests"]) == bench.offset, "every span has ended"


async def test_tokens_then_done() -> None:
    bench = Bench()
    *tokens, done = await bench.serve(body(metadata={"page": 3}))
    assert [e.index for e in [*tokens, done]] == list(range(len(tokens) + 1))
    assert all(isinstance(e, TokensEvent) and e.epoch == 3 and e.choice == 0 for e in tokens)
    assert isinstance(done, DoneEvent)
    assert done.finish_reason == "length" and done.finish_reasons == ["length"]
    assert done.usage.prompt_tokens == 2 and done.usage.completion_tokens == 8
    assert done.timing.ttft_ms is not None and done.timing.ttft_ms <= done.timing.total_ms
    assert done.metadata == {"page": 3} and done.text is None
    assert {m.topic for m in bench.publisher.sent} == {"plait.responses.r1"}
    assert {m.key for m in bench.publisher.sent} == {b"r1"}
    assert "".join(e.text for e in tokens) == FakeTokenizer().decode(ids_of(tokens))
    ended_well(bench)


async def test_the_answer_has_the_encoding_and_the_correlation_of_the_request() -> None:
    bench = Bench()
    request = json.dumps({"v": 1, "request_id": "j", "prompt": "hi"}).encode()
    headers = [
        ("correlation_id", b"\xff\x00"),
        ("kafka_correlationId", b"7"),
        ("x", b"y"),
        ("baggage", b"\xfe"),
    ]
    await bench.serve(request, headers)
    for sent in bench.publisher.sent:
        found = dict(sent.headers)
        assert found["content-type"] == JSON.encode()
        assert found["plait-type"] == sent.event().type.encode()
        assert found["correlation_id"] == b"\xff\x00" and found["kafka_correlationId"] == b"7"
        assert found["baggage"] == b"\xfe", "carried through untouched"
        assert "x" not in found


async def test_several_choices() -> None:
    bench = Bench(FakeEngine(pace=0.001))
    *tokens, done = await bench.serve(body(sampling=Sampling(n=3, max_tokens=4, seed=5)))
    assert [e.index for e in tokens] == list(range(len(tokens)))
    assert isinstance(done, DoneEvent) and done.choice == 0 and done.finish_reasons == ["length"] * 3
    assert done.usage.completion_tokens == 12 and done.usage.prompt_tokens == 2
    assert len({tuple(ids_of(tokens, choice)) for choice in range(3)}) == 3
    assert [r.sampling.seed for r in bench.engine.submitted] == [5, 6, 7]
    ended_well(bench)


async def test_whole_answer_in_the_terminal_event() -> None:
    bench = Bench()
    (done,) = await bench.serve(body(stream=False, sampling=Sampling(n=2, logprobs=1)))
    assert isinstance(done, DoneEvent) and done.index == 0
    assert done.texts is not None and done.text == done.texts[0] != done.texts[1]
    assert done.token_ids is not None and len(done.token_ids) == 8
    assert done.logprobs is not None and len(done.logprobs) == 8


async def test_a_whole_answer_over_the_size_limit_is_split_over_events() -> None:
    settings = Settings.load(worker={"max_event_bytes": 20_000})
    bench = Bench(FakeEngine(text_per_token="é" * 7_001, per_output=4), settings)
    *tokens, done = await bench.serve(body(stream=False, sampling=Sampling(max_tokens=8)))
    assert isinstance(done, DoneEvent) and done.text is None and done.token_ids is None
    assert "".join(e.text for e in tokens) == "é" * 7_001 * 8
    assert len(ids_of(tokens)) == 8 and len(tokens) > 5
    assert [e.index for e in [*tokens, done]] == list(range(len(tokens) + 1))
    assert all(len(m.value or b"") <= 20_000 for m in bench.publisher.sent)


@pytest.mark.parametrize(
    ("value", "code", "says"),
    [
        (b'{"v": 1, "request_id": "r1", "prompt": 3}', "invalid_request", "prompt"),
        (b'{"v": 9, "request_id": "r1", "prompt": "x"}', "invalid_request", "version"),
        (b'{"request_id": "r1"}', "invalid_request", "prompt"),
        (
            b'{"request_id": "r1", "prompt": "x", "sampling": {"temperature": -1}}',
            "invalid_request",
            "temperature",
        ),
        (body(model="other"), "model_not_found", "other"),
        (body(prompt_token_ids=[5000]), "invalid_request", "5000"),
        (body(prompt_token_ids=[1] * 100_000), "prompt_too_long", "99999"),
        (body(prompt=" "), "invalid_request", "prompt"),
        (body(messages=[{"role": "user", "content": "refuse"}]), "invalid_request", "messages"),
        (body(response_topic="plait.dlq"), "invalid_request", "response_topic"),
        (body(response_topic="plait.requests"), "invalid_request", "response_topic"),
    ],
)
async def test_what_cannot_run_is_refused_in_one_event(value: bytes, code: str, says: str) -> None:
    bench = Bench()
    (error,) = await bench.serve(value)
    assert isinstance(error, ErrorEvent) and error.index == 0
    assert error.code == code and says in error.message and not error.retryable
    assert bench.publisher.sent[0].topic == "plait.responses.r1"
    ended_well(bench)
    span = bench.process_span()
    assert span.attributes is not None and span.attributes["error.type"] == code
    assert span.attributes["plait.outcome"] == "error" and not span.status.is_ok


async def test_refusal_after_some_choices_were_taken() -> None:
    engine = FakeEngine()
    submit, taken = engine.submit, []

    def second_refused(request: Any, on_output: Any) -> None:
        from plait.engine.api import RequestRefused

        if taken:
            raise RequestRefused("overloaded", "slo.ttft_ms", "would take 900 ms", retry_after=0.7304)
        taken.append(request)
        submit(request, on_output)

    engine.submit = second_refused  # type: ignore[method-assign]
    bench = Bench(engine)
    (error,) = await bench.serve(body(sampling=Sampling(n=2)))
    assert isinstance(error, ErrorEvent) and error.code == "overloaded" and error.retryable
    assert error.retry_after_ms == 730 and error.message == "slo.ttft_ms: would take 900 ms"
    assert engine.cancelled == [taken[0].request_id]
    await until(lambda: engine.idle)
    ended_well(bench)


@pytest.mark.parametrize(
    ("retry_after", "retryable", "retry_after_ms"),
    [(2.0, True, 2000), (None, True, None), (math.inf, False, None)],
)
async def test_what_the_engine_gives_up_says_when_to_come_back(
    retry_after: float | None, retryable: bool, retry_after_ms: int | None
) -> None:
    """Two of three choices: one terminal event."""
    engine = FakeEngine(retry_after=retry_after)
    engine.fail_next("overloaded")
    engine.fail_next("overloaded")
    bench = Bench(engine)
    *tokens, error = await bench.serve(body(sampling=Sampling(n=3)))
    assert all(isinstance(event, TokensEvent) for event in tokens)
    assert isinstance(error, ErrorEvent) and error.code == "overloaded"
    assert (error.retryable, error.retry_after_ms) == (retryable, retry_after_ms)
    await until(lambda: engine.idle)
    ended_well(bench)


async def test_a_deadline_does_not_end_what_is_wanted_late() -> None:
    bench = Bench(FakeEngine(pace=0.02))
    late = Slo(deadline_ms=100, on_miss="serve")
    *_, done = await bench.serve(body(slo=late, sampling=Sampling(max_tokens=20)))
    assert isinstance(done, DoneEvent) and done.slo.deadline_met is False
    assert done.usage.completion_tokens == 20


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "no value"),
        (b"", "empty"),
        (b"\x00\x01\xff", ""),
        (b"{", ""),
        (b"[1, 2]", "map"),
        (b'{"prompt": "no id"}', "request_id"),
        (b'{"request_id": "a b", "prompt": "x"}', "request_id"),
        (b'{"request_id": 7, "prompt": "x"}', "request_id"),
    ],
)
async def test_what_nobody_can_be_told_is_dead_lettered(value: bytes | None, reason: str) -> None:
    bench = Bench()
    headers = [("bad", b"\xff\xfe"), ("traceparent", b"\xff"), ("null", None), ("content-type", b"\x80")]
    assert await bench.serve(value, headers, key=None) == []
    (letter,) = bench.dead_letters()
    assert letter.value == value
    assert letter.key == (b"" if value is None else None), "a message needs a key or a value"
    assert letter.headers[: len(headers)] == headers
    found = dict(letter.headers)
    assert found["plait-dlq-topic"] == b"plait.requests" and found["plait-dlq-offset"] == b"0"
    assert found["plait-dlq-partition"] == b"0" and int(found["plait-dlq-timestamp"] or 0) > 0
    assert reason in (found["plait-dlq-reason"] or b"").decode()
    ended_well(bench)


async def test_reply_to_headers_name_the_topic_when_the_body_does_not() -> None:
    bench = Bench()
    for name, headers, topic in (
        ("a", [("reply_to", b"plait.answers.mine")], "plait.answers.mine"),
        ("b", [("kafka_replyTopic", b"plait.clients.spring")], "plait.clients.spring"),
    ):
        await bench.serve(body(name), headers)
        assert bench.publisher.sent[-1].topic == topic
    await bench.serve(body("c", response_topic="plait.answers.body"), [("reply_to", b"header")])
    assert bench.publisher.sent[-1].topic == "plait.answers.body"
    (error,) = await bench.serve(body("d"), [("reply_to", b"\xff no topic")])
    assert error.type == "error" and "reply_to" in error.message
    assert bench.publisher.sent[-1].topic == "plait.responses.d"


async def test_no_response_topic_means_dead_letter() -> None:
    bench = Bench()
    bench.topics.missing.add("plait.answers.gone")
    assert await bench.serve(body(response_topic="plait.answers.gone")) == []
    (letter,) = bench.dead_letters()
    assert b"gone: does not exist" in (dict(letter.headers)["plait-dlq-reason"] or b"")
    await until(lambda: bench.engine.idle)
    ended_well(bench)


async def test_expired_on_arrival_never_reaches_the_engine() -> None:
    bench = Bench()
    old = int(time.time() * 1000) - 10_000
    (error,) = await bench.serve(body(slo=Slo(deadline_ms=5_000), created_at=old))
    assert isinstance(error, ErrorEvent) and error.code == "deadline_exceeded"
    assert bench.engine.submitted == []
    (error,) = await bench.serve(body(slo=Slo(deadline_ms=5_000)), timestamp=old)
    assert isinstance(error, ErrorEvent) and error.code == "deadline_exceeded", "the record's time counts too"
    ended_well(bench)


async def test_expired_while_running() -> None:
    bench = Bench(FakeEngine(pace=0.05))
    *tokens, error = await bench.serve(body(slo=Slo(deadline_ms=200), sampling=Sampling(max_tokens=500)))
    assert isinstance(error, ErrorEvent) and error.code == "deadline_exceeded"
    assert error.index == len(tokens)
    assert len(bench.engine.cancelled) == 1
    ended_well(bench)


async def test_a_creation_time_in_the_future_counts_as_now() -> None:
    bench = Bench()
    future = int(time.time() * 1000) + 3_600_000
    *_, done = await bench.serve(body(slo=Slo(deadline_ms=60_000, ttft_ms=60_000), created_at=future))
    assert isinstance(done, DoneEvent)
    assert done.slo.deadline_met is True and done.slo.ttft_met is True and done.slo.tpot_met is None


async def test_objectives_count_from_the_creation() -> None:
    bench = Bench()
    old = int(time.time() * 1000) - 10_000
    *_, done = await bench.serve(body(slo=Slo(ttft_ms=9_000, tpot_ms=3_600_000), created_at=old))
    assert isinstance(done, DoneEvent)
    assert done.slo.ttft_met is False and done.slo.tpot_met is True and done.slo.deadline_met is None


async def test_cancelled_before_it_was_read() -> None:
    bench = Bench()
    bench.services.cancels.remember("r1")
    (done,) = await bench.serve(body())
    assert isinstance(done, DoneEvent) and done.finish_reason == "cancelled"
    assert done.usage.completion_tokens == 0 and bench.engine.submitted == []
    ended_well(bench)


@pytest.mark.parametrize("deaf", [False, True])
async def test_cancelled_while_waiting_in_the_engine(deaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.service.choices.CANCEL_GRACE_S", 0.05)
    bench = Bench(FakeEngine(deaf=deaf))
    bench.engine.hold()
    stream = bench.start(body())
    await until(lambda: bench.engine.submitted)
    stream.cancel()
    stream.cancel()
    assert stream.task is not None
    await stream.task
    (done,) = bench.events()
    assert isinstance(done, DoneEvent) and done.finish_reason == "cancelled"
    if not deaf:
        ended_well(bench)
    await bench.engine.stop()


async def test_cancelled_while_running() -> None:
    bench = Bench(FakeEngine(pace=0.002))
    stream = bench.start(body(sampling=Sampling(max_tokens=1000, n=2)))
    await until(lambda: len(bench.publisher.sent) > 4)
    stream.cancel()
    assert stream.task is not None
    await stream.task
    *tokens, done = bench.events()
    assert isinstance(done, DoneEvent) and done.finish_reasons == ["cancelled", "cancelled"]
    assert done.usage.completion_tokens == sum(len(e.token_ids) for e in tokens if e.type == "tokens")
    ended_well(bench)


async def test_cancelled_after_the_end_changes_nothing() -> None:
    bench = Bench()
    stream = bench.start(body())
    assert stream.task is not None
    await stream.task
    stream.cancel()
    stream.revoke()
    assert [e.type for e in bench.events()].count("done") == 1
    ended_well(bench)


async def test_the_engine_fails_one_request() -> None:
    bench = Bench(FakeEngine(pace=0.001))
    bench.engine.fail_next()
    *tokens, error = await bench.serve(body(sampling=Sampling(n=2)))
    assert isinstance(error, ErrorEvent) and error.code == "internal" and error.retryable
    assert error.index == len(tokens)
    await until(lambda: bench.engine.idle)
    ended_well(bench)


async def test_the_engine_is_lost() -> None:
    bench = Bench(FakeEngine(pace=0.001))
    stream = bench.start(body(sampling=Sampling(max_tokens=1000)))
    await until(lambda: bench.publisher.sent)
    bench.engine.crash()
    assert stream.task is not None
    await stream.task
    assert [e.type for e in bench.events() if e.type != "tokens"] == ["error"]
    ended_well(bench)


async def test_a_second_message_with_an_id_in_flight_is_dead_lettered() -> None:
    bench = Bench()
    bench.engine.hold()
    first = bench.start(body())
    await until(lambda: bench.engine.submitted)
    assert await bench.serve(body(prompt="another")) == []
    (letter,) = bench.dead_letters()
    assert b"duplicate request_id in flight" in (dict(letter.headers)["plait-dlq-reason"] or b"")
    bench.engine.release()
    assert first.task is not None
    await first.task
    assert [e.type for e in bench.events()].count("done") == 1
    ended_well(bench)


@pytest.mark.parametrize("how", ["revoke", "hand_over"])
async def test_an_abandoned_request_gets_no_terminal_event(how: str) -> None:
    bench = Bench(FakeEngine(pace=0.001))
    stream = bench.start(body(sampling=Sampling(max_tokens=1000)))
    await until(lambda: len(bench.publisher.sent) > 2)
    getattr(stream, how)()
    assert not bench.services.streams, "a second delivery may come at once"
    assert stream.task is not None
    await stream.task
    assert {e.type for e in bench.events()} == {"tokens"}
    await until(lambda: bench.engine.idle)
    assert (
        bench.partition.tracker.position == 0
        and bench.partition.tracker.unfinished == 1
        and bench.partition.tracker.unfinished == 1
    )
    assert bench.ended and not bench.partition.leases
    attributes = bench.process_span().attributes or {}
    assert attributes["plait.outcome"] == {"revoke": "revoked", "hand_over": "handed_over"}[how]


async def test_a_request_that_is_abandoned_before_its_first_step_leaves_nothing_behind() -> None:
    bench = Bench()
    stream = bench.start(body())
    stream.revoke()
    assert stream.task is not None
    await asyncio.wait([stream.task])
    assert bench.publisher.sent == [] and bench.ended and not bench.partition.leases
    assert bench.partition.tracker.unfinished == 1
    assert (bench.process_span().attributes or {})["plait.outcome"] == "revoked"


async def test_an_error_event_follows_what_the_producer_still_holds() -> None:
    bench = Bench(FakeEngine(pace=0.001))
    bench.publisher.hold()
    stream = bench.start(body(sampling=Sampling(max_tokens=1000)))
    assert stream.task is not None
    await until(lambda: len(bench.publisher.sent) > 2)

    def broken(*_: Any) -> list[bytes]:
        raise RuntimeError("bug")

    assert stream._answers is not None
    stream._answers.tokens = broken  # type: ignore[method-assign]
    await until(lambda: bench.engine.cancelled)
    held, bench.publisher.held = bench.publisher.held or [], None
    for delivery in held:
        delivery.set_result(None)
    await stream.task
    *tokens, error = bench.events()
    assert isinstance(error, ErrorEvent) and error.index == len(tokens) == len(held)


async def test_a_failure_of_our_own_is_an_error_event() -> None:
    bench = Bench()

    def broken(text: str) -> list[int]:
        raise RuntimeError("bug")

    bench.engine.tokenizer.encode = broken  # type: ignore[method-assign]
    (error,) = await bench.serve(body())
    assert isinstance(error, ErrorEvent) and error.code == "internal" and "bug" in error.message
    ended_well(bench)


def test_a_seed_is_drawn_from_the_request_id() -> None:
    request = Request(request_id="r1", prompt="x")
    assert seed_of(request) == seed_of(Request(request_id="r1", prompt="y"))
    assert seed_of(request) != seed_of(Request(request_id="r2", prompt="x"))
    assert 0 <= seed_of(request) < 2**62
    assert seed_of(Request(request_id="r1", prompt="x", sampling=Sampling(seed=-3))) == -3


async def test_clock_is_injectable() -> None:
    now = 1_000_000.0
    bench = Bench(clock=Clock(wall=lambda: now))
    (error,) = await bench.serve(body(created_at=int(now * 1000) - 2000, slo=Slo(deadline_ms=1000)))
    assert isinstance(error, ErrorEvent) and error.code == "deadline_exceeded"
