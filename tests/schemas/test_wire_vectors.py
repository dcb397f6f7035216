"""The golden vectors: other languages check themselves against the same file."""

from __future__ import annotations

import base64
import json
from typing import Any

import jsonschema
import pytest
import wire_cases

from plait.schemas import WireError, decode_control, decode_event, decode_request, encode, json_schemas

VECTORS = json.loads(wire_cases.INDEX.read_text())
SCHEMAS = json_schemas()
VALIDATORS = {kind: jsonschema.Draft202012Validator(schema) for kind, schema in SCHEMAS.items()}


def decode(vector: dict[str, Any]) -> tuple[Any, str | None]:
    value = None if vector["base64"] is None else base64.b64decode(vector["base64"])
    if vector["kind"] == "request":
        return decode_request(value, vector["content_type"])
    read = decode_event if vector["kind"] == "event" else decode_control
    return read(value, vector["content_type"]), vector.get("found")


def ids(vector: dict[str, Any]) -> str:
    return vector["name"]


def test_the_file_is_what_the_cases_make() -> None:
    assert json.loads(json.dumps(wire_cases.build())) == VECTORS
    names = [vector["name"] for vector in VECTORS]
    assert len(set(names)) == len(names)
    assert {vector["kind"] for vector in VECTORS} == {"request", "event", "control"}


@pytest.mark.parametrize("vector", [v for v in VECTORS if "decoded" in v], ids=ids)
def test_valid(vector: dict[str, Any]) -> None:
    model, found = decode(vector)
    assert found == vector["found"]
    assert json.loads(encode(model, "application/json")) == vector["decoded"]
    if vector.get("canonical"):
        assert encode(model, found) == base64.b64decode(vector["base64"])
    VALIDATORS[vector["kind"]].validate(vector["decoded"])


@pytest.mark.parametrize("vector", [v for v in VECTORS if "error" in v], ids=ids)
def test_invalid(vector: dict[str, Any]) -> None:
    with pytest.raises(WireError) as caught:
        decode(vector)
    error, expected = caught.value, vector["error"]
    assert error.field == expected["field"], error
    assert error.code == expected["code"]
    assert error.request_id == expected["request_id"]
    assert error.response_topic == expected["response_topic"]
    assert str(error).startswith(error.field) and error.message
    if error.request_id:
        assert error.content_type in ("application/msgpack", "application/json")


@pytest.mark.parametrize("vector", [v for v in VECTORS if v.get("by_schema") is not None], ids=ids)
def test_the_schema_refuses_what_it_can(vector: dict[str, Any]) -> None:
    fields = json.loads(base64.b64decode(vector["base64"]))
    assert VALIDATORS[vector["kind"]].is_valid(fields) is not vector["by_schema"]


@pytest.mark.parametrize(
    "vector", [v for v in VECTORS if v["kind"] == "request" and v.get("found") == "application/json"], ids=ids
)
def test_the_schema_takes_valid_requests_as_written(vector: dict[str, Any]) -> None:
    VALIDATORS["request"].validate(json.loads(base64.b64decode(vector["base64"]).decode("utf-8-sig")))


def test_a_message_of_the_error_names_the_limit() -> None:
    with pytest.raises(
        WireError, match=r"^sampling\.temperature: must be less than or equal to 100, not 101"
    ):
        decode_request(b'{"request_id":"a","prompt":"x","sampling":{"temperature":101}}', None)
    with pytest.raises(WireError, match=r"^v: unknown wire version 2; known: 1"):
        decode_request(b'{"request_id":"a","prompt":"x","v":2}', None)
    with pytest.raises(WireError, match=r"priority.*; stream: must be a valid boolean"):
        decode_request(b'{"request_id":"a","prompt":"x","priority":10,"stream":0}', None)
