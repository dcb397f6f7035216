"""The picture of a record: requests as rows, iterations as columns."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from plait.engine.recorder import Span

COLORS = {"waiting": "#e4e4e7", "prefill": "#d95f02", "decode": "#1b9e77", "swapped": "#7570b3"}
MAX_ROWS = 120
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<body style="margin:1em;font-family:sans-serif"><div style="overflow-x:auto">{svg}</div></body></html>
"""


def draw(spans: list[Span], target: Path, first: int = 0, count: int = 400) -> int:
    """Draw the iterations `first` to `first + count - 1`; gives the number of requests in them, at most MAX_ROWS of
    which are drawn. ValueError when there is none."""
    last = first + count - 1
    rows: dict[str, list[Span]] = {}
    for span in spans:
        if span.last >= first and span.first <= last:
            rows.setdefault(span.request, []).append(span)
    if not rows:
        raise ValueError(f"the record has no iteration from {first} to {last}")
    figure = _figure(dict(list(rows.items())[:MAX_ROWS]), first, last)
    if target.suffix.lower() == ".html":
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg")
        svg = buffer.getvalue()
        target.write_text(PAGE.format(title=target.stem, svg=svg[svg.index("<svg") :]), encoding="utf-8")
    else:
        figure.savefig(target, dpi=110)
    return len(rows)


def _figure(rows: dict[str, list[Span]], first: int, last: int) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    end = min(last, max(span.last for spans in rows.values() for span in spans))
    figure = Figure(
        figsize=(min(18.0, 4 + 0.04 * (end - first)), 1.4 + 0.17 * len(rows)), layout="constrained"
    )
    axes = figure.add_subplot()
    for row, spans in enumerate(rows.values()):
        for span in spans:
            begin, stop = max(span.first, first), min(span.last, last)
            height = 0.3 if span.state == "waiting" else 0.8
            axes.broken_barh(
                [(begin - 0.5, stop - begin + 1)], (row - height / 2, height), facecolors=COLORS[span.state]
            )
    axes.set_yticks(
        range(len(rows)), [f"{name}  p{spans[0].priority}" for name, spans in rows.items()], fontsize=7
    )
    axes.set(xlim=(first - 0.5, end + 0.5), ylim=(len(rows) - 0.4, -0.6), xlabel="iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(
        handles=[Patch(color=color, label=state) for state, color in COLORS.items()],
        loc="outside upper right",
        ncols=len(COLORS),
        frameon=False,
    )
    return figure
