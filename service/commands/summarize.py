"""`plait summarize`: long texts through Kafka, at batch priority."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.service.commands.options import BootstrapServers, Model, RequestsTopic, Timeout

if TYPE_CHECKING:
    from rich.console import Console

    from plait.service.summarize import Plan, Summarizer


def command(
    files: Annotated[list[Path], typer.Argument(help="Text files in UTF-8.", metavar="FILE...")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", file_okay=False, help="A folder for FILE.summary.txt.")
    ] = None,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=64, help="Of one request.")] = 800,
    max_in_flight: Annotated[int, typer.Option("--max-in-flight", min=1, help="Requests at a time.")] = 8,
    instruction: Annotated[
        str | None, typer.Option("--instruction", help="What to ask of the model.")
    ] = None,
    bootstrap_servers: BootstrapServers = None,
    model: Model = "smollm2",
    requests_topic: RequestsTopic = "plait.requests",
    timeout: Timeout = 600.0,
) -> None:
    """Summarize files: their chunks first, then the summaries of the chunks."""
    from plait.service.summarize import INSTRUCTION, Plan

    plan = Plan(
        chunk_tokens=chunk_tokens,
        max_in_flight=max_in_flight,
        instruction=instruction or INSTRUCTION,
        timeout_s=timeout,
    )
    raise typer.Exit(asyncio.run(_summarize(files, out, plan, bootstrap_servers, model, requests_topic)))


async def _summarize(
    files: list[Path],
    out: Path | None,
    plan: Plan,
    bootstrap_servers: str | None,
    model: str,
    requests_topic: str,
) -> int:
    from rich.console import Console

    from plait.service.client import Client
    from plait.service.commands.connect import kafka_options
    from plait.service.local import brokers_or_local
    from plait.service.summarize import Summarizer
    from plait.service.token_count import counter

    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        console.print(line, style="dim", markup=False)

    failed = 0
    targets = _targets(files, out)
    async with brokers_or_local(
        bootstrap_servers, {"engine": {"model": model}, "topics": {"requests": requests_topic}}, say
    ) as stack:
        count, note = await asyncio.to_thread(counter, stack.engine, model)
        if note:
            say(note)
        options = kafka_options(stack.bootstrap_servers)
        async with (
            stack.watching(),
            Client(stack.bootstrap_servers, requests_topic=requests_topic, kafka=options) as client,
        ):
            summarizer = Summarizer(client, count, plan)
            with _progress(console, summarizer):
                async for outcome in summarizer.run(files):
                    if outcome.error:
                        failed += 1
                        console.print(f"plait: {outcome.path}: {outcome.error}", style="red", markup=False)
                    else:
                        _deliver(outcome.path, outcome.summary, targets, len(files) > 1)
                        say(f"{outcome.path}: {targets.get(outcome.path, 'done')}")
    return 1 if failed else 0


def _targets(files: list[Path], out: Path | None) -> dict[Path, Path]:
    """Where each summary goes; files of the same name in different folders get a number."""
    if out is None:
        return {}
    out.mkdir(parents=True, exist_ok=True)
    targets: dict[Path, Path] = {}
    taken: set[str] = set()
    for file in files:
        name, turn = file.name, 1
        while name in taken:
            turn += 1
            name = f"{file.stem}-{turn}{file.suffix}"
        taken.add(name)
        targets[file] = out / f"{name}.summary.txt"
    return targets


def _deliver(path: Path, summary: str, targets: dict[Path, Path], headed: bool) -> None:
    if targets:
        targets[path].write_text(summary + "\n", encoding="utf-8")
        return
    if headed:
        print(f"== {path}")
    print(summary, flush=True)
    if headed:
        print()


@contextmanager
def _progress(console: Console, summarizer: Summarizer) -> Iterator[None]:
    """A bar on a terminal; elsewhere the lines about finished files are enough."""
    if not console.is_terminal:
        yield
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("summarizing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("requests", total=None)
        summarizer.on_progress = lambda: progress.update(
            task, completed=summarizer.finished, total=summarizer.planned
        )
        yield
