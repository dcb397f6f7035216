"""Whatever comes in, the codec answers with a model or a WireError."""

from __future__ import annotations

import json
import string
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from plait.schemas import (
    JSON,
    MSGPACK,
    Cancel,
    DoneEvent,
    ErrorCode,
    ErrorEvent,
    FinishReason,
    Message,
    Request,
    Sampling,
    Slo,
    SloResult,
    Timing,
    TokenLogprob,
    TokensEvent,
    TopLogprob,
    Usage,
    WireError,
    decode_control,
    decode_event,
    decode_request,
    encode,
    is_request_id,
    is_topic,
    tokens_event_bytes,
)

ENCODINGS = st.sampled_from([MSGPACK, JSON])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=200)
TOPICS = IDS.filter(lambda name: name not in (".", ".."))
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
METADATA = st.dictionaries(TEXT, SCALARS | st.lists(SCALARS, max_size=3), max_size=4)
MILLIS = st.floats(0, 1e9)
COUNTS = st.integers(0, 2**53)


def floats(low: float, high: float, *, above: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, high, exclude_min=above)


SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.none() | st.integers(50, 2**31 - 1),
    min_tokens=st.integers(0, 50),
    temperature=floats(0, 100),
    top_p=floats(0, 1, above=True),
    top_k=st.integers(-1, 2**31 - 1),
    min_p=floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    n=st.integers(1, 16),
    stop=st.lists(TEXT.filter(bool), max_size=4) | TEXT.filter(bool),
    stop_token_ids=TOKENS,
    ignore_eos=st.booleans(),
    presence_penalty=floats(-2, 2),
    frequency_penalty=floats(-2, 2),
    repetition_penalty=floats(0, 10, above=True),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), floats(-100, 100), max_size=4),
    logprobs=st.none() | st.integers(0, 20),
    skip_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
)
INPUTS = st.one_of(
    st.fixed_dictionaries({"prompt": TEXT.filter(bool)}),
    st.fixed_dictionaries({"prompt_token_ids": TOKENS.filter(bool)}),
    st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.builds(Message, role=st.sampled_from(["user", "system"]), content=TEXT), min_size=1
            )
        }
    ),
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    limits = st.none() | st.integers(1, 3_600_000)
    return Request(
        request_id=draw(IDS),
        model=draw(st.none() | TEXT.filter(bool)),
        tenant=draw(st.none() | st.sampled_from(["a", "team:b/c@d"])),
        sampling=draw(SAMPLINGS),
        priority=draw(st.integers(0, 9)),
        slo=draw(st.builds(Slo, ttft_ms=limits, tpot_ms=limits, deadline_ms=limits)),
        response_topic=draw(st.none() | TOPICS),
        stream=draw(st.booleans()),
        created_at=draw(st.none() | COUNTS),
        metadata=draw(METADATA),
        **draw(INPUTS),
    )


LOGPROB = st.floats(-1e6, 0)
LOGPROBS = st.lists(
    st.builds(
        TokenLogprob,
        token_id=st.integers(0, 9),
        logprob=LOGPROB,
        top=st.lists(st.builds(TopLogprob, token_id=st.integers(0, 9), logprob=LOGPROB), max_size=3),
    ),
    max_size=3,
)
ENVELOPE: dict[str, Any] = {"request_id": IDS, "index": COUNTS, "choice": st.integers(0, 15), "epoch": COUNTS}
REASONS = st.sampled_from(FinishReason)
TOKENS_EVENTS = st.builds(TokensEvent, **ENVELOPE, token_ids=TOKENS, text=TEXT, logprobs=st.none() | LOGPROBS)
DONE_EVENTS = st.builds(
    DoneEvent,
    **ENVELOPE,
    finish_reason=REASONS,
    finish_reasons=st.lists(REASONS, min_size=1, max_size=16),
    usage=st.builds(Usage, prompt_tokens=COUNTS, cached_tokens=COUNTS, completion_tokens=COUNTS),
    timing=st.builds(Timing, queue_ms=st.none() | MILLIS, ttft_ms=st.none() | MILLIS, total_ms=MILLIS),
    slo=st.builds(SloResult, ttft_met=st.none() | st.booleans()),
    text=st.none() | TEXT,
    texts=st.none() | st.lists(TEXT, max_size=3),
    token_ids=st.none() | TOKENS,
    logprobs=st.none() | LOGPROBS,
    metadata=METADATA,
)
ERROR_EVENTS = st.builds(
    ErrorEvent,
    **ENVELOPE,
    code=st.sampled_from(ErrorCode),
    message=TEXT,
    retryable=st.booleans(),
    retry_after_ms=st.none() | COUNTS,
    metadata=METADATA,
)


@settings(deadline=None)
@given(requests(), ENCODINGS)
def test_requests_round_trip(request: Request, content_type: str) -> None:
    value = encode(request, content_type)
    assert decode_request(value, content_type) == (request, content_type)
    assert decode_request(value, None) == (request, content_type)


@settings(deadline=None)
@given(TOKENS_EVENTS | DONE_EVENTS | ERROR_EVENTS, ENCODINGS)
def test_events_round_trip(event: TokensEvent | DoneEvent | ErrorEvent, content_type: str) -> None:
    value = encode(event, content_type)
    again = decode_event(value, None)
    assert type(again) is type(event) and again == event


@settings(deadline=None)
@given(IDS, ENCODINGS)
def test_cancel_round_trips(request_id: str, content_type: str) -> None:
    cancel = Cancel(request_id=request_id)
    assert decode_control(encode(cancel, content_type), None) == cancel


@settings(deadline=None)
@given(TOKENS_EVENTS, ENCODINGS)
def test_the_fast_path_gives_the_same_bytes(event: TokensEvent, content_type: str) -> None:
    fast = tokens_event_bytes(
        event.request_id,
        event.index,
        event.choice,
        event.epoch,
        event.token_ids,
        event.text,
        event.logprobs,
        content_type,
    )
    assert fast == encode(event, content_type)


def test_an_unknown_encoding_is_the_callers_fault() -> None:
    with pytest.raises(ValueError, match="text/plain"):
        encode(Cancel(request_id="a"), "text/plain")


def decode_all(value: bytes, content_type: str | None = None) -> None:
    """Every decoder, which may only succeed or raise a well-formed WireError."""
    for decode in (decode_request, decode_event, decode_control):
        try:
            result: Any = decode(value, content_type)
        except WireError as error:
            assert error.message and error.code == ErrorCode.INVALID_REQUEST
            str(error).encode()
            assert error.request_id is None or (is_request_id(error.request_id) and error.content_type)
            assert error.response_topic is None or is_topic(error.response_topic)
        else:
            model = result[0] if isinstance(result, tuple) else result
            assert isinstance(model, BaseModel)
            # What was taken can be written and read again, in both encodings.
            for kind in (MSGPACK, JSON):
                again: Any = decode(encode(model, kind), kind)
                assert (again[0] if isinstance(again, tuple) else again) == model


HEADERS = st.sampled_from([None, MSGPACK, JSON, "text/plain", ""])


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=200), HEADERS)
def test_any_bytes(value: bytes, content_type: str | None) -> None:
    decode_all(value, content_type)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60))
def test_any_bytes_in_a_map(value: bytes) -> None:
    decode_all(b"\x82\xaarequest_id\xa1a\xa6prompt" + value, MSGPACK)
    decode_all(b'{"request_id":"a","prompt":' + value + b"}", JSON)


FIELDS = st.sampled_from(
    [*Request.model_fields, *Sampling.model_fields, *DoneEvent.model_fields, "code", "extra"]
)
ODD = PLAIN | st.floats() | st.integers() | st.binary(max_size=3)


@settings(deadline=None, max_examples=500)
@given(st.dictionaries(FIELDS, ODD, max_size=8), st.booleans())
def test_any_map(fields: dict[str, Any], with_id: bool) -> None:
    if with_id:
        fields = {"request_id": "a", "v": 1, **fields}
    for value in written(fields):
        decode_all(value)


@settings(deadline=None, max_examples=500)
@given(requests(), st.data())
def test_a_changed_request(request: Request, data: st.DataObject) -> None:
    fields = request.model_dump(exclude_none=True)
    target = data.draw(st.sampled_from([fields, fields["sampling"], fields["slo"]]))
    name = data.draw(st.sampled_from([*target, "extra"]) if target else st.just("extra"))
    target[name] = data.draw(ODD | st.dictionaries(st.integers() | TEXT, ODD, max_size=3))
    for value in written(fields):
        decode_all(value)


@settings(deadline=None, max_examples=500)
@given(requests(), ENCODINGS, st.data())
def test_a_damaged_request(request: Request, content_type: str, data: st.DataObject) -> None:
    value = bytearray(encode(request, content_type))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(value) - 1))
        value[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    decode_all(bytes(value), data.draw(st.sampled_from([None, content_type])))


def written(fields: dict[str, Any]) -> list[bytes]:
    """The map in each encoding that can hold it."""
    values = []
    for write in (msgpack.packb, lambda plain: json.dumps(plain).encode()):
        try:
            values.append(write(fields))
        except (TypeError, ValueError, OverflowError):
            continue
    return values
