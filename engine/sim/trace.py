"""Traces of requests: CSV files in the form of the Azure LLM inference traces (Patel et al., Splitwise, ISCA 2024).

The columns TIMESTAMP, ContextTokens and GeneratedTokens are read, whatever else there is and in whatever order.
"""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A file that is no trace; the message names the file, the line and the column."""


class Row(NamedTuple):
    """One request: seconds after the first of the trace, tokens of its prompt, tokens generated for it."""

    at: float
    prompt: int
    output: int


def read(path: Path) -> list[Row]:
    """The requests by arrival. Raises TraceError; OSError when the file cannot be opened."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = _rows(path, csv.reader(file))
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not text in UTF-8: {error.reason} at byte {error.start}") from None
    except csv.Error as error:
        raise TraceError(f"{path}: is not CSV: {error}") from None
    if not rows:
        raise TraceError(f"{path}: holds no requests")
    try:
        rows.sort(key=lambda row: row[0])
        first = rows[0][0]
        return [Row((at - first).total_seconds(), prompt, output) for at, prompt, output in rows]
    except TypeError:
        raise TraceError(f"{path}: column TIMESTAMP: some have a time zone and some have none") from None


def _rows(path: Path, lines: csv.Reader) -> list[tuple[datetime, int, int]]:
    header = [name.strip() for name in next(lines, [])]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise TraceError(f"{path}: line 1: no column {' and no column '.join(missing)}; found {header}")
    where = [header.index(name) for name in COLUMNS]
    rows = []
    for cells in lines:
        if not any(cell.strip() for cell in cells):
            continue

        def fail(column: int, why: str, line: int = lines.line_num) -> TraceError:
            return TraceError(f"{path}: line {line}, column {COLUMNS[column]}: {why}")

        values = []
        for column, place in enumerate(where):
            if place >= len(cells):
                raise fail(column, "is missing")
            values.append(cells[place].strip())
        try:
            at = datetime.fromisoformat(values[0])
        except ValueError:
            raise fail(0, f"{values[0]!r} is not a time like 2023-11-16 18:15:46.6805900") from None
        counts = []
        for column in (1, 2):
            text = values[column]
            if not (text.isascii() and text.isdigit() and int(text) > 0):
                raise fail(column, f"{text!r} is not a whole number above 0")
            counts.append(int(text))
        rows.append((at, counts[0], counts[1]))
    return rows
