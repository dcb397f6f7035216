"""Splits long text by tokens at paragraph ends, else sentence ends, else words, else anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

CountTokens = Callable[[str], int]

# Each matches up to and including the white space after the end, so that joined chunks are the text again.
_ENDS = (
    re.compile(r"\n[ \t\r]*\n\s*"),
    re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]+\s*"),
    re.compile(r"\s+"),
)
_FULL_ENOUGH = 0.25


def split(text: str, limit: int, count: CountTokens) -> list[str]:
    """Cut `text` into chunks of at most `limit` tokens each, as `count` counts them.

    The concatenation of the chunks is the text. A chunk ends at the last paragraph end that fits, unless
    that leaves it less than a quarter full; then at a sentence end, a word end, or between characters.
    Raises ValueError when one character alone is over the limit.
    """
    return list(_chunks(text, limit, count))


def _chunks(text: str, limit: int, count: CountTokens) -> Iterator[str]:
    if limit < 1:
        raise ValueError(f"a chunk must hold at least one token, not {limit}")
    start, guess = 0, 4 * limit
    while start < len(text):
        longest = _longest(text, start, guess, limit, count)
        end = longest if longest == len(text) else _cut(text, start, longest, limit, count)
        yield text[start:end]
        start, guess = end, longest - start


def _longest(text: str, start: int, guess: int, limit: int, count: CountTokens) -> int:
    """The end of a piece from `start` that fits, as long as galloping and bisection find it."""
    size, step = 0, max(1, guess)
    rest = len(text) - start
    while size < rest:
        trial = min(size + step, rest)
        if count(text[start : start + trial]) > limit:
            break
        size, step = trial, step * 2
    else:
        return len(text)
    over = trial
    while over - size > 1:
        middle = (size + over) // 2
        if count(text[start : start + middle]) <= limit:
            size = middle
        else:
            over = middle
    if size == 0:
        raise ValueError(f"a limit of {limit} tokens is too small to hold the character {text[start]!r}")
    return start + size


def _cut(text: str, start: int, longest: int, limit: int, count: CountTokens) -> int:
    """The best place to end a piece that may reach to `longest`."""
    least = start + max(1, int((longest - start) * _FULL_ENOUGH))
    for pattern in _ENDS:
        ends = [match.end() for match in pattern.finditer(text, start, longest)]
        for end in reversed(ends):
            if end < least:
                break
            # A tokenizer may need more tokens for a prefix than for the whole.
            if count(text[start:end]) <= limit:
                return end
    return longest
