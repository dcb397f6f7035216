"""A request that is delivered again goes on where its response topic ends."""

import asyncio
from typing import Any

import pytest
from test_stream import body, ids_of

from fakes import FakeEngine
from plait.schemas import DoneEvent, ErrorEvent, Event, Sampling, Slo, TokensEvent
from plait.service.commit_metadata import Mark
from service_bench import Bench, until


async def undisturbed(value: bytes, **engine: Any) -> list[Event]:
    return await Bench(FakeEngine(**engine)).serve(value)


def text_of(events: list[Any], choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, TokensEvent) and e.choice == choice)


async def again(
    bench: Bench, value: bytes, before: list[Event], mark: Mark | None = None, **record: Any
) -> list[Any]:
    stream = bench.redeliver(value, before, mark, **record)
    assert stream.task is not None
    await stream.task
    return bench.events()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("cut", range(9))
async def test_goes_on_after_the_last_event(cut: int, n: int) -> None:
    value = body(sampling=Sampling(n=n, seed=3, logprobs=1))
    whole = await undisturbed(value)
    bench = Bench(FakeEngine(pace=0.001))
    rest = await again(bench, value, whole[:cut])
    assert [e.index for e in rest] == list(range(cut, cut + len(rest)))
    assert {e.epoch for e in rest} == {4} and isinstance(rest[-1], DoneEvent)
    for choice in range(n):
        assert ids_of(whole[:cut] + rest[:-1], choice) == ids_of(whole[:-1], choice)
        assert text_of(whole[:cut] + rest, choice) == text_of(whole, choice)
        (sequence,) = [s for s in bench.engine.submitted if s.request_id.endswith(f".{choice}")]
        assert sequence.output_token_ids == ids_of(whole[:cut], choice), "computed once more: nothing"
    assert rest[-1].usage == whole[-1].usage  # type: ignore[union-attr]
    assert all(len(e.logprobs or ()) == len(e.token_ids) for e in rest[:-1])
    assert bench.partition.tracker.position == 1


async def test_what_was_answered_is_only_acknowledged() -> None:
    value = body()
    bench = Bench()
    assert await again(bench, value, await undisturbed(value)) == []
    assert not bench.engine.submitted and bench.partition.tracker.position == 1
    attributes = bench.process_span().attributes
    assert attributes is not None and attributes["plait.outcome"] == "acknowledged"
    assert await again(bench, b'{"request_id": "bad", "prompt": 3}', await undisturbed(value)) == []


async def test_a_first_delivery_reads_nothing_and_neither_does_a_topic_that_was_made_just_now() -> None:
    bench = Bench()
    await bench.serve(body())
    assert bench.lookup.asked == []
    bench = Bench()
    stream = bench.redeliver(body(), [])
    bench.topics.old.clear()
    assert stream.task is not None
    await stream.task
    assert bench.lookup.asked == [] and bench.events()[-1].type == "done"


async def test_shared_topics_are_asked_from_the_time_of_the_request_on() -> None:
    bench = Bench()
    bench.topics.old.add("plait.answers.shared")
    await again(bench, body(response_topic="plait.answers.shared"), [], timestamp=1_234_567)
    await again(bench, body(request_id="r2"), [])
    assert bench.lookup.asked == [
        ("plait.answers.shared", "r1", 1_234_567),
        ("plait.responses.r2", "r2", None),
    ]


async def test_an_event_that_was_cut_in_two_and_published_half() -> None:
    whole = await undisturbed(body(), per_output=4)
    first, second = whole[0], whole[1]
    assert isinstance(first, TokensEvent) and isinstance(second, TokensEvent)
    for tokens, characters in ((2, 1), (1, 7), (3, 0), (0, 3)):
        half = first.model_copy(
            update={"token_ids": first.token_ids[:tokens], "text": first.text[:characters]}
        )
        rest = await again(Bench(), body(), [half])
        assert ids_of([half, *rest[:-1]]) == ids_of(whole[:-1])
        assert text_of([half, *rest]) == text_of(whole)


async def test_text_that_this_worker_would_not_have_written() -> None:
    before = TokensEvent(request_id="r1", index=0, epoch=1, token_ids=[5], text="something else")
    (error,) = await again(Bench(), body(), [before])
    assert (
        isinstance(error, ErrorEvent)
        and error.index == 1
        and error.retryable
        and "tokenizer" in error.message
    )


async def test_a_gap_is_filled_and_the_epoch_is_above_what_is_there(caplog: Any) -> None:
    whole = await undisturbed(body())
    before = [whole[0].model_copy(update={"epoch": 9}), whole[2].model_copy(update={"epoch": 9})]
    rest = await again(Bench(), body(), before)
    assert [e.index for e in rest] == list(range(1, len(whole))) and {e.epoch for e in rest} == {10}
    assert ids_of([whole[0], *rest[:-1]]) == ids_of(whole[:-1]) and "gap" in caplog.text


async def test_the_whole_at_the_end_goes_on_in_pieces_when_it_was_begun_in_pieces() -> None:
    value = body(stream=False)
    pieces = await undisturbed(body())
    (done,) = await again(Bench(), value, [])
    assert isinstance(done, DoneEvent) and done.token_ids == ids_of(pieces[:-1])
    *rest, done = await again(Bench(), value, pieces[:3])
    assert isinstance(done, DoneEvent) and done.text is None
    assert ids_of(pieces[:3] + rest) == ids_of(pieces[:-1])


async def test_cancelled_and_expired_meanwhile() -> None:
    whole = await undisturbed(body())
    bench = Bench()
    bench.services.cancels.remember("r1")
    (done,) = await again(bench, body(), whole[:3])
    assert isinstance(done, DoneEvent) and done.finish_reason == "cancelled" and done.index == 3
    assert done.usage.completion_tokens == len(ids_of(whole[:3])) and not bench.engine.submitted
    (error,) = await again(Bench(), body(slo=Slo(deadline_ms=10), created_at=1), whole[:3])
    assert isinstance(error, ErrorEvent) and error.code == "deadline_exceeded" and error.index == 3


async def test_a_request_that_took_workers_down_twice() -> None:
    bench, value = Bench(), body(metadata={"page": 1})
    (error,) = await again(bench, value, [], Mark(2, 3))
    assert isinstance(error, ErrorEvent) and error.code == "internal" and not error.retryable
    assert "2 workers died" in error.message and error.metadata == {"page": 1}
    (letter,) = bench.dead_letters()
    assert letter.value == value and b"2 workers died" in dict(letter.headers)["plait-dlq-reason"]  # type: ignore[operator]
    assert not bench.engine.submitted and bench.partition.tracker.position == 1
    assert bench.partition.progress(clean=False).marks == {}


async def test_one_that_got_further_in_its_last_attempt_is_not_to_blame() -> None:
    whole = await undisturbed(body())
    published = [e.model_copy(update={"epoch": 3}) for e in whole[:2]]
    assert (await again(Bench(), body(), published, Mark(2, 3)))[-1].type == "done"
    (error,) = await again(Bench(), body(), published, Mark(2, 4))
    assert isinstance(error, ErrorEvent) and error.index == 2, "it died there again and again"


async def test_an_attempt_in_the_generation_of_the_one_before_is_told_from_it() -> None:
    """A static member that comes back within its session timeout finds its generation unchanged."""
    published = [e.model_copy(update={"epoch": 4}) for e in (await undisturbed(body()))[:2]]
    bench = Bench(FakeEngine(pace=0.001))
    bench.engine.hold()
    stream = bench.redeliver(body(), published)
    assert bench.partition.epoch == 4
    await until(lambda: bench.engine.submitted)
    bench.engine._sequences[bench.engine.submitted[0].request_id].timeline.scheduled = 1.0
    marks = bench.partition.progress(clean=False).marks
    assert marks == {0: Mark(1, 5)}
    stream.hand_over()
    await asyncio.wait([stream.task] if stream.task else [])
    (error,) = await again(Bench(), body(), published, Mark(2, 5))
    assert isinstance(error, ErrorEvent), "the tokens are from before those attempts"


async def test_the_suspected_run_one_after_the_other() -> None:
    bench = Bench(FakeEngine(pace=0.001))
    bench.engine.hold()
    streams = [bench.redeliver(body(request_id=f"r{i}"), [], Mark(1, 2)) for i in range(3)]
    fresh = bench.redeliver(body(request_id="fresh"), [])
    await until(lambda: len(bench.engine.submitted) == 2)
    await asyncio.sleep(0.01)
    assert len(bench.engine.submitted) == 2, "the first of the three, and the one that is not suspected"
    bench.engine.release()
    await asyncio.wait([s.task for s in (*streams, fresh) if s.task])
    assert [e.type for e in bench.events()].count("done") == 4 and not bench.services.trial.locked()


async def test_at_risk_from_its_beginning_to_its_first_token_but_not_while_it_waits() -> None:
    bench = Bench(FakeEngine(pace=0.001, max_running=1))
    bench.engine.hold()
    first, second = bench.start(body(request_id="a")), bench.start(body(request_id="b"))
    await until(lambda: len(bench.engine.submitted) == 2)
    for sequence in bench.engine._sequences.values():
        sequence.timeline.scheduled = (
            1.0 if sequence.request.request_id.startswith(f"{first._number}.") else None
        )
    assert bench.partition.progress(clean=False).marks == {0: Mark(1, 3)}
    assert bench.partition.progress(clean=True).marks == {}
    bench.engine.release()
    await until(lambda: bench.events())
    assert 0 not in bench.partition.progress(clean=False).marks
    await asyncio.wait([s.task for s in (first, second) if s.task])


async def test_a_request_that_the_engine_died_of() -> None:
    bench, value = Bench(), body()
    bench.engine.fail_next("poison")
    *_, error = await bench.serve(value)
    assert isinstance(error, ErrorEvent) and error.code == "internal" and not error.retryable
    (letter,) = bench.dead_letters()
    assert letter.value == value and dict(letter.headers)["plait-dlq-reason"] == b"made to fail"
    assert bench.partition.tracker.position == 1
