"""A few requests of different priorities, their tokens as they come, and a table of how each went."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from plait.schemas import DoneEvent, TokensEvent, Usage
from plait.service.client import Client, RequestFailed, StreamBroken

if TYPE_CHECKING:
    from plait.schemas import Timing

# Name, priority, prompt, in the order of their arrival: the most urgent come last.
PROMPTS = (
    ("night-job", 0, "Write two sentences about a lighthouse keeper in a storm."),
    ("animals", 1, "Name three animals that live in the ocean."),
    ("garden", 2, "Give one tip for growing herbs on a balcony."),
    ("mail", 4, "Write a two sentence email that invites a team to lunch on Friday."),
    ("explain", 5, "Why is the sky blue? Answer in two sentences."),
    ("poem", 6, "Write a four line poem about the sea."),
    ("morning", 8, "Describe a good morning in one sentence."),
    ("question", 9, "What is the capital of France?"),
)


@dataclass(slots=True)
class Row:
    """One request of the demo. `finish` is a finish reason, an error code, or empty while it runs."""

    name: str
    priority: int
    prompt: str
    text: str = ""
    tokens: int = 0
    finish: str = ""
    timing: Timing | None = None
    usage: Usage | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.finish in ("stop", "length")

    @property
    def tokens_per_second(self) -> float | None:
        """Of its own time on the device, from leaving the queue to the last token."""
        if self.timing is None or self.usage is None:
            return None
        seconds = (self.timing.total_ms - (self.timing.queue_ms or 0)) / 1000
        return self.usage.completion_tokens / seconds if seconds > 0 else None


def rows(count: int) -> list[Row]:
    """`count` requests; the prompts come round again when there are more than prompts."""
    made = []
    for index in range(count):
        name, priority, prompt = PROMPTS[index % len(PROMPTS)]
        turn = index // len(PROMPTS)
        made.append(Row(name if not turn else f"{name}-{turn + 1}", priority, prompt))
    return made


class Display(Protocol):
    def update(self, row: Row, text: str) -> None:
        """`text` was added to a row, or it has finished."""


class PlainDisplay:
    """Whole words in prefixed lines, for pipes and logs."""

    WIDTH = 72

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pending: dict[str, str] = {}

    def update(self, row: Row, text: str) -> None:
        pending = self._pending.pop(row.name, "") + text
        while (line := self._take_line(pending, bool(row.finish))) is not None:
            pending = pending[len(line) :]
            if line.strip():
                self._line(row, line.strip())
        if row.finish:
            self._line(row, f"<{row.finish}>" if not row.error else f"<{row.finish}> {row.error}")
        else:
            self._pending[row.name] = pending

    def _take_line(self, pending: str, last: bool) -> str | None:
        newline = pending.find("\n")
        if 0 <= newline < self.WIDTH:
            return pending[: newline + 1]
        if len(pending) > self.WIDTH:
            space = pending.rfind(" ", 1, self.WIDTH)
            return pending[: space if space > 0 else self.WIDTH]
        return pending if last and pending else None

    def _line(self, row: Row, text: str) -> None:
        self._console.file.write(f"[{row.name} p{row.priority}] {text}\n")
        self._console.file.flush()


class LiveDisplay:
    """A panel per request, in two columns, redrawn in place a few times a second."""

    def __init__(self, requests: list[Row], console: Console) -> None:
        self._rows = requests
        self._console = console

    def update(self, row: Row, text: str) -> None:
        """Nothing to do: the next drawing shows it."""

    def render(self) -> RenderableType:
        lines = max(2, min(10, (self._console.height - 2) // ((len(self._rows) + 1) // 2) - 2))
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        panels = [self._panel(row, lines) for row in self._rows]
        for left in range(0, len(panels), 2):
            grid.add_row(*panels[left : left + 2])
        return grid

    def _panel(self, row: Row, lines: int) -> Panel:
        width = max(10, self._console.width // 2 - 4)
        wrapped = Text(row.text.strip()).wrap(self._console, width)
        body = Text("\n").join(wrapped[-lines:]) if wrapped else Text("...", style="dim")
        style = "dim" if not row.text else "cyan" if not row.finish else "green" if row.ok else "red"
        title = f"{row.name} · priority {row.priority}" + (f" · {row.finish}" if row.finish else "")
        return Panel(body, title=title, title_align="left", border_style=style, height=lines + 2)


@contextmanager
def display(console: Console, requests: list[Row]) -> Iterator[Display]:
    if not console.is_terminal:
        yield PlainDisplay(console)
        return
    shown = LiveDisplay(requests, console)
    with Live(get_renderable=shown.render, console=console, refresh_per_second=12):
        yield shown


async def run(client: Client, requests: list[Row], max_tokens: int, shown: Display) -> None:
    """Submit all requests and follow them to their ends; what fails is noted in its row."""
    ids = [
        await client.submit(
            messages=[{"role": "user", "content": row.prompt}],
            priority=row.priority,
            max_tokens=max_tokens,
            temperature=0.0,
            repetition_penalty=1.1,
            metadata={"demo": row.name},
        )
        for row in requests
    ]
    await asyncio.gather(*(_follow(client, i, row, shown) for i, row in zip(ids, requests, strict=True)))


async def _follow(client: Client, request_id: str, row: Row, shown: Display) -> None:
    try:
        async for event in client.stream(request_id):
            if isinstance(event, TokensEvent):
                row.text += event.text
                row.tokens += len(event.token_ids)
                shown.update(row, event.text)
            elif isinstance(event, DoneEvent):
                row.finish, row.timing, row.usage = event.finish_reason.value, event.timing, event.usage
    except RequestFailed as failure:
        row.finish, row.error = failure.code, failure.message
    except (TimeoutError, StreamBroken) as failure:
        row.finish, row.error = "lost", str(failure)
    shown.update(row, "")


def summary(requests: Iterable[Row]) -> RenderableType:
    """One line per request, and why those failed that did."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("id", no_wrap=True)
    for name in ("priority", "queue ms", "first token ms", "tokens", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("finish", no_wrap=True)
    errors = []
    for row in requests:
        timing = row.timing
        table.add_row(
            row.name,
            str(row.priority),
            _number(timing.queue_ms if timing else None),
            _number(timing.ttft_ms if timing else None),
            str(row.usage.completion_tokens if row.usage else row.tokens),
            _number(row.tokens_per_second, 1),
            Text(row.finish, style="green" if row.ok else "red"),
        )
        if row.error:
            errors.append(Text(f"{row.name}: {row.error}", style="red"))
    return Group(table, *errors)


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
