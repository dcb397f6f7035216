"""`plait cancel`: end a request wherever it is."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from plait.service.commands.connect import kafka_options
from plait.service.commands.options import Brokers


def command(
    request_id: Annotated[str, typer.Argument(help="The id of the request.")],
    bootstrap_servers: Brokers,
    control_topic: Annotated[str, typer.Option("--control-topic")] = "plait.control",
) -> None:
    """Cancel a request; its stream ends with finish reason `cancelled`."""
    from plait.schemas.names import is_request_id

    if not is_request_id(request_id):
        raise typer.BadParameter("must be 1 to 200 letters, digits, '.', '_' or '-'", param_hint="REQUEST_ID")
    asyncio.run(_cancel(bootstrap_servers, control_topic, request_id))
    typer.echo(f"asked the workers to cancel {request_id}")


async def _cancel(bootstrap_servers: str, control_topic: str, request_id: str) -> None:
    from plait.service.client import Client

    # Per-request topics: this client reads no responses, so it needs no topic of its own.
    async with Client(
        bootstrap_servers,
        control_topic=control_topic,
        per_request_topics=True,
        kafka=kafka_options(bootstrap_servers),
    ) as client:
        await client.cancel(request_id)
