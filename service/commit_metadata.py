"""What is committed beside an offset: what is finished above it, and what may have been started.

The text is `p1.` and base64 (RFC 4648, section 5, no padding) of a zlib stream (RFC 1950, so with a checksum) of
unsigned LEB128 numbers:

    reach, epoch, marks, marks * (gap, attempts, age), runs * (gap, length)

`reach` counts from the committed offset: records from there on have not been started by anybody. `epoch` is the
generation that committed, or the highest of a mark. A mark is an unfinished record that was being started: `gap`
offsets after the one before (the first counts from the committed offset), in its `attempts`th attempt, whose events
have the epoch `epoch - age`. A run is `length` finished offsets that begin `gap` after the end of the run before.

The text ends with a NUL: confluent-kafka's Python client takes metadata for a C string, and reads on without one.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

LIMIT = 4096  # bytes: Kafka's default for offset.metadata.max.bytes
PREFIX = "p1."
END = "\0"
LARGEST = 1 << 20  # of a payload, unpacked
MOST = 1_000_000  # finished offsets


@dataclass(frozen=True, slots=True)
class Mark:
    """An attempt at a record that had not come to a first token: which one, and the generation that made it."""

    attempts: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of one partition beside its committed offset; all offsets are absolute."""

    reach: int
    epoch: int
    finished: Sequence[int] = ()
    marks: Mapping[int, Mark] = field(default_factory=dict)


def encode(position: int, progress: Progress, limit: int = LIMIT) -> str:
    """At most `limit` characters, all of them ASCII. What does not fit is cut: first the highest finished
    offsets, then the highest marks. Empty when not even the rest fits."""
    marks = sorted(progress.marks.items())
    found = list(runs(progress.finished))
    text = _text(position, progress, marks, found)
    if len(text) <= limit:
        return text
    if len(_text(position, progress, marks, [])) <= limit:
        return _longest(len(found), limit, lambda n: _text(position, progress, marks, found[:n]))
    return _longest(len(marks), limit, lambda n: _text(position, progress, marks[:n], []))


def decode(position: int, text: str) -> Progress | None:
    """The state that was committed with `position`, or None when the text is not of this format, whoever wrote
    it."""
    if not text.startswith(PREFIX):
        return None
    packed = text[len(PREFIX) :].removesuffix(END)
    try:
        unpack = zlib.decompressobj()
        payload = unpack.decompress(base64.b64decode(packed + "=" * (-len(packed) % 4), b"-_", True), LARGEST)
        if not unpack.eof or unpack.unused_data:
            return None
        return _parse(position, numbers(payload))
    except (ValueError, binascii.Error, zlib.error):
        return None


def runs(offsets: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Ascending offsets as (start, length) of each row without a gap."""
    start = end = -1
    for offset in offsets:
        if offset == end:
            end += 1
            continue
        if end > start:
            yield start, end - start
        start, end = offset, offset + 1
    if end > start:
        yield start, end - start


def numbers(payload: bytes) -> Iterator[int]:
    """Unsigned LEB128. Raises ValueError for a number that is cut off or over 63 bits."""
    value = shift = 0
    for byte in payload:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value
            value = shift = 0
        elif shift > 56:
            raise ValueError("a number over 63 bits")
    if shift:
        raise ValueError("a number is cut off")


def _text(
    position: int, progress: Progress, marks: list[tuple[int, Mark]], found: list[tuple[int, int]]
) -> str:
    values = [max(0, progress.reach - position), progress.epoch, len(marks)]
    at = position
    for offset, mark in marks:
        values += [offset - at, mark.attempts, max(0, progress.epoch - mark.epoch)]
        at = offset
    at = position
    for start, length in found:
        values += [start - at, length]
        at = start + length
    payload = bytearray()
    for value in values:
        while value > 0x7F:
            payload.append(value & 0x7F | 0x80)
            value >>= 7
        payload.append(value)
    return PREFIX + base64.urlsafe_b64encode(zlib.compress(bytes(payload), 9)).decode().rstrip("=") + END


def _longest(count: int, limit: int, make: Callable[[int], str]) -> str:
    """The longest text within the limit that `make` gives for up to `count` entries."""
    best, low, high = "", 0, count
    while low <= high:
        middle = (low + high) // 2
        text = make(middle)
        if len(text) <= limit:
            best, low = text, middle + 1
        else:
            high = middle - 1
    return best


def _parse(position: int, values: Iterator[int]) -> Progress:
    try:
        reach, epoch, count = next(values), next(values), next(values)
        marks: dict[int, Mark] = {}
        at = position
        for _ in range(count):
            gap, attempts, age = next(values), next(values), next(values)
            at += gap
            marks[at] = Mark(attempts, epoch - age)
    except StopIteration:
        raise ValueError("the payload is cut off") from None
    finished: list[int] = []
    at = position
    for gap in values:
        length = next(values, 0)
        if not length or len(finished) + length > MOST:
            raise ValueError("a run of finished offsets is empty or too long")
        finished += range(at + gap, at + gap + length)
        at += gap + length
    return Progress(position + reach, epoch, finished, marks)
