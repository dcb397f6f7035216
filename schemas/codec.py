"""Messages to bytes and back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from plait.schemas.control import Cancel
from plait.schemas.events import DoneEvent, ErrorEvent, Event, TokenLogprob, TokensEvent
from plait.schemas.names import KNOWN_VERSIONS, WIRE_VERSION
from plait.schemas.parse import JSON, MSGPACK, canonical_type, read_map, refusal
from plait.schemas.request import Request

__all__ = ["JSON", "MSGPACK", "canonical_type", "decode_control", "decode_event", "decode_request", "encode"]

M = TypeVar("M", bound=BaseModel)

_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_EVENTS: dict[str, type[TokensEvent] | type[DoneEvent] | type[ErrorEvent]] = {
    "tokens": TokensEvent,
    "done": DoneEvent,
    "error": ErrorEvent,
}


_SUBJECT = re.compile(r"^(?:Input|String|List|Dictionary) should ")
_MESSAGES = {
    "missing": "is missing",
    "model_type": "must be a map",
    "dict_type": "must be a map",
    "list_type": "must be a list",
}


def encode(model: BaseModel, content_type: str = MSGPACK) -> bytes:
    """The bytes of a message, without its absent fields. ValueError for an unknown content type."""
    return pack(model.model_dump(exclude_none=True), content_type)


def pack(fields: dict[str, Any], content_type: str = MSGPACK) -> bytes:
    kind = canonical_type(content_type)
    if kind is None:
        raise ValueError(f"unknown content type {content_type!r}; known are {MSGPACK} and {JSON}")
    if kind == JSON:
        return _to_json(fields).encode()
    packed: bytes = msgpack.packb(fields)
    return packed


def tokens_event_bytes(
    request_id: str,
    index: int,
    choice: int,
    epoch: int,
    token_ids: Sequence[int],
    text: str,
    logprobs: Sequence[TokenLogprob] | None = None,
    content_type: str = MSGPACK,
) -> bytes:
    """`encode(TokensEvent(...))` without the model, for the path that every token takes. Checks nothing."""
    fields: dict[str, Any] = {
        "v": WIRE_VERSION,
        "type": "tokens",
        "request_id": request_id,
        "index": index,
        "choice": choice,
        "epoch": epoch,
        "token_ids": list(token_ids),
        "text": text,
    }
    if logprobs is not None:
        fields["logprobs"] = [entry.model_dump() for entry in logprobs]
    return pack(fields, content_type)


def decode_request(value: bytes | None, content_type: str | None) -> tuple[Request, str]:
    """The request in a message, and the content type it was read as. Raises WireError."""
    fields, found = read_map(value, content_type, int_keys_at="sampling.logit_bias")
    return _validate(Request, fields, found), found


def decode_event(value: bytes | None, content_type: str | None) -> Event:
    """The event in a message. Raises WireError."""
    fields, found = read_map(value, content_type)
    _check_version(fields, found)
    kind = fields.get("type")
    model = _EVENTS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise refusal(f"must be one of {', '.join(_EVENTS)}", "type", fields, found)
    return _validate(model, fields, found)


def decode_control(value: bytes | None, content_type: str | None) -> Cancel:
    """The cancellation in a message. Raises WireError."""
    fields, found = read_map(value, content_type)
    _check_version(fields, found)
    if "type" not in fields:
        raise refusal("is missing", "type", fields, found)
    return _validate(Cancel, fields, found)


def _check_version(fields: dict[str, Any], content_type: str) -> None:
    version = fields.get("v", WIRE_VERSION)
    if type(version) is not int or version not in KNOWN_VERSIONS:
        known = ", ".join(map(str, KNOWN_VERSIONS))
        raise refusal(f"unknown wire version {_show(version)}; known: {known}", "v", fields, content_type)


def _validate(model: type[M], fields: dict[str, Any], content_type: str) -> M:
    _check_version(fields, content_type)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        problems = [(_path(e), _message(e)) for e in error.errors(include_url=False)]
    field, message = problems[0]
    others = [f"{path}: {text}" for path, text in problems[1:5]]
    if len(problems) > 5:
        others.append(f"and {len(problems) - 5} more")
    raise refusal("; ".join([message, *others]), field, fields, content_type)


def _path(error: ErrorDetails) -> str:
    path = ""
    for part in error["loc"]:
        if part != "[key]":
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
    inner = error.get("ctx", {}).get("path")
    return f"{path}.{inner}".lstrip(".") if inner else path.lstrip(".")


def _message(error: ErrorDetails) -> str:
    if error["type"] in _MESSAGES:
        return _MESSAGES[error["type"]]
    text = _SUBJECT.sub("must ", error["msg"])
    given = error["input"]
    if isinstance(given, str | int | float) and error["type"] != "string_pattern_mismatch":
        return f"{text}, not {_show(given)}"
    return text


def _show(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = ascii(value)
    return text if len(text) <= 40 else text[:37] + "..."
