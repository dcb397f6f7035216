"""Bytes to a map of plain data, msgpack or JSON, whatever the bytes are."""

from __future__ import annotations

import json
from typing import Any

import msgpack

from plait.schemas.errors import WireError
from plait.schemas.names import MAX_INT32, is_request_id, is_topic
from plait.schemas.plain import MAX_CONTAINERS, find_problem, join

MSGPACK = "application/msgpack"
JSON = "application/json"

MAX_VALUE_BYTES = 8 * 1024 * 1024

_TYPES = {
    "application/msgpack": MSGPACK,
    "application/x-msgpack": MSGPACK,
    "application/vnd.msgpack": MSGPACK,
    "application/json": JSON,
    "text/json": JSON,
}


def canonical_type(content_type: str | None) -> str | None:
    """MSGPACK, JSON, or None for anything else; parameters and case do not matter."""
    return _TYPES.get((content_type or "").partition(";")[0].strip().lower())


def read_map(
    value: bytes | None, content_type: str | None, int_keys_at: str | None = None
) -> tuple[dict[str, Any], str]:
    """The map that `value` holds, and the content type it was read as. Top-level nulls are left out.

    Raises WireError, which knows request id and response topic where the map itself could be read.
    """
    found = canonical_type(content_type)
    if not value:
        raise WireError(
            "the message has no value" if value is None else "the value is empty", content_type=found
        )
    if len(value) > MAX_VALUE_BYTES:
        raise WireError(f"{len(value)} bytes is over the limit of {MAX_VALUE_BYTES}", content_type=found)
    found = found or _sniff(value)
    if found is None:
        raise WireError("is neither a msgpack map nor a JSON object")
    pairs = _Pairs()
    try:
        fields, extra = _read_json(value, pairs) if found == JSON else _read_msgpack(value, pairs)
    except _Unreadable as error:
        raise WireError(str(error), content_type=found) from None
    except RecursionError:
        raise WireError("is nested too deeply", content_type=found) from None
    except Exception as error:  # the parsers raise a dozen kinds
        label = "msgpack" if found == MSGPACK else "JSON"
        raise WireError(f"is not valid {label}: {_short(error)}", content_type=found) from None
    problem = ("", extra) if extra else find_problem(fields, int_keys_at=int_keys_at) or pairs.problem
    if problem:
        known = {
            key: fields.get(key) for key in ("request_id", "response_topic") if key not in pairs.repeated
        }
        raise refusal(problem[1], problem[0], known, found)
    return {key: item for key, item in fields.items() if item is not None}, found


def refusal(message: str, field: str, fields: dict[str, Any], content_type: str) -> WireError:
    """A WireError that carries what of `fields` is needed to answer the sender."""
    request_id, topic = fields.get("request_id"), fields.get("response_topic")
    return WireError(
        message,
        field=field,
        request_id=request_id if is_request_id(request_id) else None,
        response_topic=topic if is_topic(topic) else None,
        content_type=content_type,
    )


class _Unreadable(Exception):
    pass


class _Pairs:
    """Makes maps of key-value pairs and remembers what a map would hide: a key given twice."""

    def __init__(self) -> None:
        self.problem: tuple[str, str] | None = None
        self.repeated: set[Any] = set()
        self._left = MAX_CONTAINERS

    def __call__(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self.count()
        if not {type(key) for key, _ in pairs} <= {str}:
            pairs = self._drop_odd_keys(pairs)
        result = dict(pairs)
        if len(result) < len(pairs):
            self._find_repeated(pairs)
        return result

    def count(self, items: list[Any] | None = None) -> list[Any] | None:
        self._left -= 1
        if self._left < 0:
            raise _Unreadable(f"has more than {MAX_CONTAINERS} maps and lists")
        return items

    def _drop_odd_keys(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Keep text and token ids. Large numbers as keys can be made to collide in a hash table."""
        kept = [(k, v) for k, v in pairs if type(k) is str or (type(k) is int and 0 <= k <= MAX_INT32)]
        if len(kept) < len(pairs):
            self.problem = self.problem or ("", "a map has keys that are not text")
        return kept

    def _find_repeated(self, pairs: list[tuple[Any, Any]]) -> None:
        seen = set()
        for key, _ in pairs:
            if key in seen:
                self.repeated.add(key)
                self.problem = self.problem or (join("", key), "is given twice in one map")
            seen.add(key)


def _sniff(value: bytes) -> str | None:
    first = value[0]
    if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        return MSGPACK
    # No msgpack map starts with one of these: white space, "{", or a byte order mark.
    return JSON if value.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{" else None


def _read_json(value: bytes, pairs: _Pairs) -> tuple[dict[str, Any], str | None]:
    text = value.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    result = json.loads(text, object_pairs_hook=pairs, parse_constant=float)
    if not isinstance(result, dict):
        raise _Unreadable("is not a JSON object")
    return result, None


def _read_msgpack(value: bytes, pairs: _Pairs) -> tuple[dict[str, Any], str | None]:
    if _sniff(value) != MSGPACK:
        raise _Unreadable("is not a msgpack map")
    try:
        fields = msgpack.unpackb(
            value,
            strict_map_key=False,
            object_pairs_hook=pairs,
            list_hook=pairs.count,
            # Bad text is found, with its path, once the map has been read.
            unicode_errors="surrogateescape",
        )
    except msgpack.ExtraData as error:
        return error.unpacked, f"{len(error.extra)} bytes follow the msgpack map"
    return fields, None


def _short(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."
