"""Bombs, and the corners that no vector can show."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from pydantic import ValidationError

from plait.schemas import (
    JSON,
    MSGPACK,
    Request,
    Sampling,
    TokensEvent,
    WireError,
    canonical_type,
    decode_event,
    decode_request,
    encode,
    response_topic_of,
)
from plait.schemas.parse import MAX_VALUE_BYTES
from plait.schemas.plain import MAX_CONTAINERS, find_problem

HEAD = b"\x83\xaarequest_id\xa1a\xa6prompt\xa1x\xa1q"


def refused(value: bytes, content_type: str | None = None) -> WireError:
    with pytest.raises(WireError) as caught:
        decode_request(value, content_type)
    return caught.value


def peak_of_refusing(value: bytes) -> int:
    tracemalloc.start()
    try:
        refused(value)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_announced_lengths_take_no_memory() -> None:
    """msgpack before 1.2 takes the memory of a list when it reads its length: 1.6 GB here."""
    announced = b"\xdd" + (1_000_000).to_bytes(4, "big")
    assert peak_of_refusing(HEAD + announced * 200 + b"\xc0" * 1_000_000) < 100_000_000


def test_many_small_lists_take_little_memory() -> None:
    count = 4_000_000
    assert peak_of_refusing(HEAD + b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count) < 64_000_000


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
def test_many_small_lists_are_refused(content_type: str) -> None:
    count = MAX_CONTAINERS + 1
    if content_type == JSON:
        value = b'{"request_id":"a","prompt":"x","q":[' + b",".join([b"[0]"] * count) + b"]}"
    else:
        value = HEAD + b"\xdd" + count.to_bytes(4, "big") + b"\x91\x00" * count
    assert "maps and lists" in refused(value).message


def test_colliding_keys_never_reach_a_hash_table() -> None:
    # All of them hash to 0 in CPython.
    modulus = sys.hash_info.modulus
    keys = [k * modulus for k in range(1, 8)]
    value = HEAD + bytes([0x80 + len(keys)]) + b"".join(msgpack.packb(key) + b"\x01" for key in keys)
    error = refused(value)
    assert error.request_id == "a" and error.message == "a map has keys that are not text"


def test_the_size_limit() -> None:
    room = MAX_VALUE_BYTES - len(b'{"request_id":"a","prompt":""}')
    fits = b'{"request_id":"a","prompt":"' + b"x" * room + b'"}'
    assert len(fits) == MAX_VALUE_BYTES
    request, _ = decode_request(fits, None)
    assert request.prompt is not None and len(request.prompt) == room
    assert str(MAX_VALUE_BYTES) in refused(fits + b" ").message
    packed = msgpack.packb({"request_id": "a", "prompt": "x" * (MAX_VALUE_BYTES - 26)})
    assert len(packed) == MAX_VALUE_BYTES
    decode_request(packed, None)
    refused(packed + b" ")


def test_long_lists_and_maps_of_an_event() -> None:
    logprobs = [{"token_id": i, "logprob": -1.0, "top": []} for i in range(10_000)]
    event = TokensEvent(request_id="a", index=0, token_ids=list(range(10_000)), text="", logprobs=logprobs)
    for content_type in (MSGPACK, JSON):
        assert decode_event(encode(event, content_type), None) == event


def test_deep_recursion_of_the_caller() -> None:
    """The interpreter's limit may be near when the codec is called; that is a refusal too."""
    value = b'{"request_id":"a","prompt":"x","q":' + b"[" * 900 + b"]" * 900 + b"}"

    def at(depth: int) -> WireError:
        return at(depth - 1) if depth else refused(value)

    assert "deep" in at(200).message


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("application/json", JSON),
        ("APPLICATION/JSON;charset=utf-8", JSON),
        (" text/json ; a=b", JSON),
        ("application/vnd.msgpack", MSGPACK),
        ("application/xml", None),
        (";", None),
        (None, None),
    ],
)
def test_content_types(header: str | None, found: str | None) -> None:
    assert canonical_type(header) == found


def test_a_text_error_is_bounded_and_printable() -> None:
    error = refused(json.dumps({"request_id": "a", "prompt": "x", "priority": "🌍" * 10_000}).encode())
    assert error.field == "priority" and str(error).isascii() and len(str(error)) < 200
    error = refused(json.dumps({"request_id": "a", "k\n" * 1000: float("nan")}).encode())
    assert len(error.field) < 80 and error.field.isprintable()
    many = {"sampling": dict.fromkeys(Sampling.model_fields, "x"), "priority": "x", "request_id": "a"}
    assert len(str(refused(json.dumps(many).encode()))) < 1000


def test_dots_make_good_request_ids_but_no_topics() -> None:
    assert decode_request(b'{"request_id":"..","prompt":"x"}', None)[0].request_id == ".."
    assert response_topic_of("..") == "plait.responses..."


def test_the_longest_request_id_makes_a_valid_topic() -> None:
    assert len(response_topic_of("x" * 200)) <= 249


def test_models_are_strict_in_python_too() -> None:
    wrong: list[dict[str, Any]] = [
        {"request_id": "a"},
        {"request_id": "a", "prompt": "x", "priority": "4"},
        {"request_id": "a", "prompt": "\ud800"},
        {"request_id": "a", "prompt": "x", "metadata": {"a": {1: 2}}},
        {"request_id": "a", "prompt": "x", "metadata": {"a": float("inf")}},
        {"request_id": "a", "prompt": "x", "metadata": {"a": object()}},
    ]
    for fields in wrong:
        with pytest.raises(ValidationError):
            Request(**fields)
    request = Request(request_id="a", prompt="x")
    with pytest.raises(ValidationError):
        request.prompt = "y"  # type: ignore[misc]


def test_defaults_are_not_shared() -> None:
    first, second = Request(request_id="a", prompt="x"), Request(request_id="b", prompt="x")
    first.metadata["a"] = 1
    first.sampling.stop.append("x")
    assert second.metadata == {} and second.sampling.stop == [] and Sampling().stop == []


def test_a_self_containing_map_is_a_problem() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = loop
    assert find_problem(loop) is not None


@pytest.mark.parametrize("make", [lambda: "é" * 10, lambda: "x"], ids=["wide", "ascii"])
def test_metadata_is_measured_in_bytes(make: Callable[[], str]) -> None:
    unit = make()
    room = (16_384 - len('{"a":""}')) // len(unit.encode())
    Request(request_id="a", prompt="x", metadata={"a": unit * room})
    with pytest.raises(ValidationError, match="16384 bytes"):
        Request(request_id="a", prompt="x", metadata={"a": unit * (room + 1)})


def test_importing_the_wire_is_light() -> None:
    code = "import sys, plait.schemas; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["torch", "transformers", "aiokafka", "numpy", "opentelemetry", "plait.engine", "plait.service"]
    run = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
