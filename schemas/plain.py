"""Data that msgpack and JSON can both carry: maps with text keys, lists, text, numbers, booleans, null."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 16
MAX_CONTAINERS = 300_000

_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1

Problem = tuple[str, str]


def find_problem(value: Any, *, depth: int = MAX_DEPTH, int_keys_at: str | None = None) -> Problem | None:
    """The first (path, what is wrong) that one of the two encodings could not carry, or None.

    `int_keys_at` is the one path whose map may have integer keys.
    """
    left = MAX_CONTAINERS
    # A stack of iterators, so that depth costs no recursion and the order stays that of the message.
    stack = [iter((("", value),))]
    while stack:
        for path, item in stack[-1]:
            kind = type(item)
            if kind is dict or kind is list:
                left -= 1
                if left < 0:
                    return path, f"the message has more than {MAX_CONTAINERS} maps and lists"
                if not item:
                    continue
                if len(stack) > depth:
                    return path, f"nested deeper than {depth} levels"
                if (
                    kind is list
                    and set(map(type, item)) == {int}
                    and _MIN_INT <= min(item) <= max(item) <= _MAX_INT
                ):
                    continue
                if kind is dict:
                    key = _bad_key(item, path == int_keys_at)
                    if key is not None:
                        return path, key
                stack.append(_children(item, path))
                break
            wrong = _bad_scalar(item)
            if wrong:
                return path, wrong
        else:
            stack.pop()
    return None


def _children(item: Any, path: str) -> Iterator[Problem]:
    if type(item) is list:
        return ((f"{path}[{i}]", child) for i, child in enumerate(item))
    return ((join(path, key), child) for key, child in item.items())


def join(path: str, key: object) -> str:
    """`path` followed by a map's key, in printable characters and bounded length."""
    name = key if isinstance(key, str) and key.isascii() and key.isprintable() else ascii(key)
    name = name if len(name) <= 60 else name[:57] + "..."
    return f"{path}.{name}" if path else name


def _bad_key(item: dict[Any, Any], int_keys: bool) -> str | None:
    for key in item:
        if type(key) is str:
            if not _is_text(key):
                return f"a key is not valid UTF-8: {ascii(key)[:60]}"
        elif not (int_keys and type(key) is int):
            return f"keys must be text, not {type(key).__name__}"
    return None


def _bad_scalar(item: Any) -> str | None:
    kind = type(item)
    if kind is str:
        return None if _is_text(item) else "is not valid UTF-8"
    if kind is int:
        return None if _MIN_INT <= item <= _MAX_INT else "is an integer of more than 64 bits"
    if kind is float:
        return None if math.isfinite(item) else "must be a finite number"
    if item is None or kind is bool:
        return None
    return f"is of a type that JSON lacks ({kind.__name__}); use text, numbers, booleans, null, lists, maps"


def _is_text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
