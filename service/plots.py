"""Pictures, by matplotlib, which is the extra `plot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

FORMATS = (".png", ".svg")


def check_target(path: Path, formats: Sequence[str] = FORMATS) -> None:
    """Raise BadParameter, before any work is done, when no picture can be written there."""
    if path.suffix.lower() not in formats:
        raise typer.BadParameter(f"{path}: a picture ends in {' or '.join(formats)}")
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {path.absolute().parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise typer.BadParameter("drawing needs matplotlib: pip install 'plait[plot]'") from None


def draw_attainment(
    path: Path, curves: Mapping[str, Sequence[Mapping[str, Any]]], loads: Sequence[float], title: str = ""
) -> None:
    """Share of requests that met all their objectives, over the load: a line per policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot(loads, [point["slo_attainment"] for point in points], marker="o", label=name)
    axes.axhline(0.9, color="gray", linestyle=":", linewidth=1)
    axes.set(xlabel="load, times the trace", ylabel="all objectives met", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
