"""`plait dev`: a broker and a worker on this machine, staying up."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from plait.service.commands.options import Model
from plait.service.commands.signals import until_signal


def command(
    no_worker: Annotated[bool, typer.Option("--no-worker", help="The broker alone.")] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Of the broker; 0: a free one.")] = 0,
    http_port: Annotated[
        int | None,
        typer.Option("--http-port", min=0, max=65535, help="Serve health and metrics there; 0: a free one."),
    ] = None,
    model: Model = "smollm2",
) -> None:
    """Run the embedded broker and a worker until SIGTERM or Ctrl-C; the address comes first."""
    from plait.service.commands.connect import log_to_stderr

    log_to_stderr()
    http: dict[str, Any] = {"enabled": http_port is not None, "port": http_port or 0}
    asyncio.run(until_signal(_dev(not no_worker, port, {"model": model}, http)))


async def _dev(worker: bool, port: int, engine: dict[str, Any], http: dict[str, Any]) -> None:
    from plait.service.local import local_stack

    def say(line: str) -> None:
        print(line, flush=True)

    sections = {"engine": engine, "http": http}
    async with local_stack(None, sections, worker=worker, port=port, say=say, on_broker=say) as stack:
        say("ready" if worker else "ready (no worker)")
        async with stack.watching():
            await asyncio.Event().wait()
