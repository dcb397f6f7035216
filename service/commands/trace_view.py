"""`plait trace-view`: what the scheduler did, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    file: Annotated[
        Path, typer.Argument(help="From `plait simulate --record` or the setting engine.record.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE.svg|.html|.png", help="Default: FILE with .svg."),
    ] = None,
    first: Annotated[int, typer.Option("--first", min=0, help="The first iteration to draw.")] = 0,
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="How many to draw.")] = 400,
) -> None:
    """Draw requests as rows and iterations as columns: waiting, prefill, decode, swapped."""
    from plait.engine.recorder import read
    from plait.service.plots import check_target
    from plait.service.trace_view import draw

    target = out or file.with_suffix(".svg")
    check_target(target, (".svg", ".html", ".png"))
    try:
        spans = read(file)
        rows = draw(spans, target, first, iterations)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    print(f"{target}: {rows} requests")
