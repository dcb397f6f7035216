"""Data that msgpack and JSON can both carry: maps with text keys, lists, text, numbers, booleans, null."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH = 16
MAX_CONTAINERS = 300_000

_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1

Problem = tuple[str, str]
Join = Callable[[str, Any], str]


def find_problem(value: Any, *, depth: int = MAX_DEPTH, int_keys_at: str | None = None) -> Problem | None:
    """The first (path, what is wrong) that one of the two encodings could not carry, or None.

    `int_keys_at` is the one path whose map may have integer keys.
    """
    left = MAX_CONTAINERS
    # A stack of iterators, so that depth costs no recursion and the order stays that of the message. A path is put
    # together only where it is needed: this is in the way of every token.
    stack: list[tuple[str, Iterator[tuple[Any, Any]], Join]] = [("", iter((("", value),)), join)]
    while stack:
        above, children, joined = stack[-1]
        for key, item in children:
            kind = type(item)
            if kind is not dict and kind is not list:
                if wrong := _bad_scalar(item):
                    return joined(above, key), wrong
                continue
            left -= 1
            if left < 0:
                return joined(above, key), f"the message has more than {MAX_CONTAINERS} maps and lists"
            if not item:
                continue
            if len(stack) > depth:
                return joined(above, key), f"nested deeper than {depth} levels"
            if kind is list:
                if set(map(type, item)) == {int} and _MIN_INT <= min(item) <= max(item) <= _MAX_INT:
                    continue
                stack.append((joined(above, key), enumerate(item), _at))
            else:
                path = joined(above, key)
                if bad_key := _bad_key(item, path == int_keys_at):
                    return path, bad_key
                stack.append((path, iter(item.items()), join))
            break
        else:
            stack.pop()
    return None


def _at(path: str, place: int) -> str:
    return f"{path}[{place}]"


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
