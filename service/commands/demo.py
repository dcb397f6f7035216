"""`plait demo`: the whole way on one machine."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from plait.service.commands.options import Model

# Fewer seats than requests, so that the priorities show in the queue times.
SEATS = 3


def command(
    bootstrap_servers: Annotated[
        str | None,
        typer.Option(
            "--bootstrap-servers",
            "-b",
            metavar="HOST:PORT[,...]",
            help="Kafka brokers instead of the embedded one.",
        ),
    ] = None,
    model: Model = "smollm2",
    requests: Annotated[int, typer.Option("--requests", min=1, help="How many.")] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Per request.")] = 64,
    no_worker: Annotated[
        bool, typer.Option("--no-worker", help="Use the workers that the brokers have.")
    ] = False,
) -> None:
    """Broker, worker and a real small model; requests of different priorities, tokens as they come."""
    if no_worker and bootstrap_servers is None:
        raise typer.BadParameter("needs --bootstrap-servers", param_hint="--no-worker")
    raise typer.Exit(asyncio.run(_demo(bootstrap_servers, model, requests, max_tokens, not no_worker)))


async def _demo(bootstrap_servers: str | None, model: str, count: int, max_tokens: int, worker: bool) -> int:
    from rich.console import Console

    from plait.service import demo
    from plait.service.client import Client
    from plait.service.commands.connect import kafka_options
    from plait.service.local import local_stack

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    rows = demo.rows(count)
    local = local_stack(
        bootstrap_servers,
        {"engine": {"model": model, "max_running": SEATS}},
        worker=worker,
        say=lambda line: console.print(line, style="dim"),
        on_broker=lambda address: console.print(f"Kafka brokers: {address}", style="dim"),
    )
    async with local as stack:
        options = kafka_options(stack.bootstrap_servers)
        async with stack.watching(), Client(stack.bootstrap_servers, kafka=options) as client:
            with demo.display(console, rows) as shown:
                await demo.run(client, rows, max_tokens, shown)
    console.print()
    console.print(demo.summary(rows))
    if worker and count > SEATS:
        console.print(
            f"\nThe batch has {SEATS} seats here: the first to come took them, the others followed by priority.",
            style="dim",
        )
    return 0 if all(row.ok for row in rows) else 1
