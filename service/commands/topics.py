"""`plait topics`: what is on the brokers, how far the workers are behind, what can go."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from plait.service.commands.connect import kafka_options, settings_of
from plait.service.commands.options import Brokers


def command(
    bootstrap_servers: Brokers,
    create: Annotated[
        bool, typer.Option("--create", help="Make the requests, control and dead-letter topics.")
    ] = False,
    remove_expired: Annotated[
        bool, typer.Option("--remove-expired", help="Delete response topics without new records.")
    ] = False,
    older_than: Annotated[
        float, typer.Option("--older-than", min=0, metavar="SECONDS", help="What counts as expired.")
    ] = 3600.0,
    group_id: Annotated[str, typer.Option("--group-id", help="The workers' consumer group.")] = "plait",
) -> None:
    """List plait's topics, with the workers' lag; create or clean up."""
    asyncio.run(_topics(bootstrap_servers, create, remove_expired, older_than, group_id))


async def _topics(
    bootstrap_servers: str, create: bool, remove_expired: bool, older_than: float, group_id: str
) -> None:
    from rich.console import Console
    from rich.table import Table

    from plait.service import topic_admin

    kafka, settings = kafka_options(bootstrap_servers), settings_of(bootstrap_servers).topics
    if create:
        for name in await topic_admin.create_fixed(kafka, settings):
            typer.echo(f"created {name}")
    rows = await topic_admin.report(kafka, settings, group_id)
    if remove_expired:
        removed = await topic_admin.remove_expired(kafka, settings, rows, older_than)
        for name in removed:
            typer.echo(f"removed {name}")
        rows = [row for row in rows if row.name not in removed]
    if not rows:
        typer.echo("no topics of plait; make them with --create, or start a worker")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("topic", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for name in ("partitions", "records", "lag", "newest"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        lag = "-" if row.lag is None else str(row.lag)
        table.add_row(row.name, row.kind, str(row.partitions), str(row.records), lag, _ago(row.age))
    console = Console()
    console.print(table, crop=False) if console.is_terminal else Console(width=200).print(table)


def _ago(age: float | None) -> str:
    if age is None:
        return "-"
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= 2 * seconds:
            return f"{age / seconds:.0f} {unit} ago"
    return f"{age:.0f} s ago"
