"""What a worker makes of a record's origin: where it answers, for whom, and how urgently."""

import json
from typing import Any

import pytest
from test_stream import body

from plait.schemas import Event
from plait.service.settings import Settings, SettingsError
from service_bench import Bench


async def refusal(bench: Bench, value: bytes, headers: Any = None) -> Event:
    (error,) = await bench.serve(value, headers)
    assert error.type == "error" and error.code == "invalid_request", error
    return error


NOT_OURS = ["payroll", "__consumer_offsets", "plait.control", "plait.requests.batch", "plait.responses.other"]


@pytest.mark.parametrize("topic", NOT_OURS)
@pytest.mark.parametrize("by_header", [False, True])
async def test_a_request_cannot_make_the_worker_write_to_any_topic(topic: str, by_header: bool) -> None:
    lanes = [{"name": "batch", "topic": "plait.requests.batch"}]
    bench = Bench(settings=Settings.load(topics={"lanes": lanes, "named_responses": ".*"}))
    strict = Bench()
    for one in (strict,) if topic == "payroll" else (strict, bench):
        asked = (
            (body("r"), [("reply_to", topic.encode())])
            if by_header
            else (body("r", response_topic=topic), None)
        )
        error = await refusal(one, *asked)
        assert topic in error.message
        assert {sent.topic for sent in one.publisher.sent} == {"plait.responses.r"}


async def test_topics_that_may_be_named() -> None:
    bench = Bench(settings=Settings.load(topics={"named_responses": r"team-[ab]\.answers"}))
    for topic in ("team-a.answers", "plait.responses.r"):
        await bench.serve(body("r", response_topic=topic))
        assert bench.publisher.sent[-1].topic == topic
    await refusal(bench, body("r", response_topic="my.team-a.answers"))
    with pytest.raises(SettingsError, match=r"topics.named_responses: .*not a regular expression"):
        Settings.load(topics={"named_responses": "("})


async def test_the_tenant_is_the_header_s() -> None:
    bench = Bench(settings=Settings.load(worker={"tenant_header": "x-tenant"}))
    header = [("x-tenant", b"team-a")]
    for fields in ({}, {"tenant": "team-a"}):
        await bench.serve(body("r", **fields), header)
        assert bench.engine.submitted[-1].tenant == "team-a"
    submitted = len(bench.engine.submitted)
    assert "tenant" in (await refusal(bench, body("r", tenant="team-b"), header)).message
    for given in (None, [("x-tenant", b"")], [("x-tenant", b"no tenant")], [("x-tenant", b"\xff")]):
        assert "x-tenant" in (await refusal(bench, body("r", tenant="team-b"), given)).message
    assert len(bench.engine.submitted) == submitted


async def test_without_the_setting_the_request_says_its_tenant() -> None:
    bench = Bench()
    await bench.serve(body("r", tenant="team-a"), [("x-tenant", b"team-b")])
    assert bench.engine.submitted[-1].tenant == "team-a"


@pytest.mark.parametrize(("given", "priority"), [({}, 8), ({"priority": 4}, 4), ({"priority": None}, 8)])
async def test_a_lane_gives_the_priority_that_a_request_does_not_name(given: Any, priority: int) -> None:
    lanes = [{"name": "urgent", "topic": "plait.requests", "priority": 8}]
    bench = Bench(settings=Settings.load(topics={"lanes": lanes}))
    value = json.dumps({"request_id": "r", "prompt": "x", **given}).encode()
    await bench.serve(value)
    assert bench.engine.submitted[-1].priority == priority


async def test_correlation_ids_are_bounded_for_every_event_carries_them() -> None:
    bench = Bench()
    error = await refusal(bench, body("r"), [("correlation_id", b"x" * 5000)])
    assert "5000 bytes" in error.message and "4096" in error.message
    assert all(len(value or b"") < 5000 for sent in bench.publisher.sent for _, value in sent.headers)
