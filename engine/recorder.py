"""What the scheduler did, iteration by iteration: for people who want to look at it (`plait trace-view`)."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from plait.engine.sequence import Chunk, Sequence, Status

COLUMNS = ("request", "priority", "state", "first", "last", "tokens", "seconds")
STATES = ("waiting", "prefill", "decode", "swapped")
MAX_REQUESTS, MAX_ITERATIONS = 256, 5_000


@dataclass(slots=True)
class Span:
    """A request in one state over the iterations `first` to `last`; `tokens` were computed for it in them."""

    request: str
    priority: int
    state: str
    first: int
    last: int
    tokens: int
    seconds: float
    """When it began, after the record's begin."""


class Recorder:
    """Keeps spans of the first MAX_REQUESTS requests that it sees, over MAX_ITERATIONS iterations; then it stops.

    So it is bounded in memory and time: an iteration costs O(chunks + MAX_REQUESTS).
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.iterations = 0
        self._open: dict[Sequence, Span] = {}
        self._seen = 0
        self._begin: float | None = None

    def add(self, seq: Sequence) -> None:
        """A sequence came; it is followed if there is place."""
        if self._seen < MAX_REQUESTS and self.iterations < MAX_ITERATIONS:
            self._seen += 1
            self._begin = seq.timeline.arrived if self._begin is None else self._begin
            seconds = seq.timeline.arrived - self._begin
            self._open[seq] = Span(seq.id, seq.priority, "", self.iterations, self.iterations, 0, seconds)

    def note(self, chunks: Iterable[Chunk], now: float) -> None:
        """An iteration is about to compute these."""
        if not self._open or self.iterations >= MAX_ITERATIONS:
            return
        counts = {chunk.seq: chunk.count for chunk in chunks}
        for seq in list(self._open):
            if seq.status is Status.FINISHED:
                del self._open[seq]
            else:
                self._note(seq, counts.get(seq, 0), now)
        self.iterations += 1

    def _note(self, seq: Sequence, count: int, now: float) -> None:
        span = self._open[seq]
        state = self._state(seq, count)
        if state != span.state:
            seconds = span.seconds if not span.state else now - (self._begin or 0.0)
            span = Span(seq.id, seq.priority, state, self.iterations, self.iterations, 0, seconds)
            self._open[seq] = span
            self.spans.append(span)
        span.last = self.iterations
        span.tokens += count

    @staticmethod
    def _state(seq: Sequence, count: int) -> str:
        if count:
            return "decode" if count == 1 and seq.computed >= seq.prompt_len else "prefill"
        return "swapped" if seq.status is Status.WAITING and seq.computed else "waiting"

    def write(self, path: Path) -> None:
        """A CSV file with COLUMNS."""
        with path.open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow(COLUMNS)
            for s in self.spans:
                lines.writerow(
                    (s.request, s.priority, s.state, s.first, s.last, s.tokens, f"{s.seconds:.4f}")
                )


class RecordError(ValueError):
    """A file that is no record; the message names the line and the column."""


def read(path: Path) -> list[Span]:
    """What `Recorder.write` wrote. Raises RecordError; OSError when the file cannot be opened."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            if tuple(next(lines, ())) != COLUMNS:
                raise RecordError(f"{path}: line 1: the columns are not {','.join(COLUMNS)}")
            return [_span(path, lines.line_num, cells) for cells in lines if cells]
    except (UnicodeDecodeError, csv.Error) as error:
        raise RecordError(f"{path}: is not CSV: {error}") from None


def _span(path: Path, line: int, cells: list[str]) -> Span:
    if len(cells) != len(COLUMNS):
        raise RecordError(f"{path}: line {line}: has {len(cells)} cells, not {len(COLUMNS)}")
    values: list[object] = []
    for name, cell, kind in zip(COLUMNS, cells, (str, int, str, int, int, int, float), strict=True):
        try:
            values.append(kind(cell))
        except ValueError:
            raise RecordError(f"{path}: line {line}, column {name}: {cell!r} is not a number") from None
    span = Span(*values)
    if span.state not in STATES:
        raise RecordError(
            f"{path}: line {line}, column state: {span.state!r} is not one of {', '.join(STATES)}"
        )
    if not 0 <= span.first <= span.last:
        raise RecordError(f"{path}: line {line}, column first: {span.first} is not before {span.last}")
    return span
