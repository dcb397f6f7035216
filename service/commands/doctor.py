"""`plait doctor`: what is missing on this machine, and what to do about it."""

from __future__ import annotations

import asyncio

import typer

from plait.service.commands.options import BootstrapServers, Model


def command(bootstrap_servers: BootstrapServers = None, model: Model = "smollm2") -> None:
    """Check Python, packages, torch, compiler, CPU and GPU, the model cache, and the brokers."""
    raise typer.Exit(asyncio.run(_doctor(bootstrap_servers, model)))


async def _doctor(bootstrap_servers: str | None, model: str) -> int:
    from rich.console import Console
    from rich.text import Text

    from plait.service.doctor import examine

    console = Console(soft_wrap=True, highlight=False)
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    failed = False
    async for check in examine(bootstrap_servers, model):
        failed |= check.status == "fail"
        console.print(
            Text.assemble((f"{check.status:<5}", styles[check.status]), f"{check.name}: {check.detail}")
        )
        if check.remedy:
            console.print(Text(f"     -> {check.remedy}"))
    return 1 if failed else 0
