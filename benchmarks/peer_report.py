"""What a comparison shows: a table, a plot, and where plait's time goes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Runs = Mapping[str, list[dict[str, Any]]]

COLUMNS = {
    "tokens/s": ("tokens_per_s", "{:.1f}"),
    "first token s": ("mean_first_token_s", "{:.2f}"),
    "mean latency s": ("mean_latency_s", "{:.2f}"),
    "p99 latency s": ("p99_latency_s", "{:.2f}"),
    "total s": ("seconds", "{:.2f}"),
    "ms/token": ("ms_per_token", "{:.1f}"),
    "peak MiB": ("peak_mib", "{:.0f}"),
}


def medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {key: statistics.median(r[key] for r in runs) for key, _ in COLUMNS.values()}


def print_table(title: str, results: Runs, failures: Mapping[str, str], limit: float | None) -> None:
    """`limit` is the rate in tokens per second that the machine would allow."""
    plait = medians(results["plait"])["tokens_per_s"] if results.get("plait") else None
    table = Table(title=title)
    table.add_column("engine", no_wrap=True)
    for heading in (*COLUMNS, "plait is x", "of limit", "first as plait"):
        table.add_column(heading, justify="right")
    for name, runs in results.items():
        if not runs:
            continue
        middle = medians(runs)
        speed = middle["tokens_per_s"]
        table.add_row(
            name,
            *(form.format(middle[key]) for key, form in COLUMNS.values()),
            f"{plait / speed:.2f}" if plait else "",
            f"{speed / limit:.0%}" if limit else "",
            agreement(runs, results.get("plait")),
        )
    if limit:
        table.add_row("limit", f"{limit:.1f}", *[""] * (len(COLUMNS) - 1), "", "100%", "")
    console = Console(width=150)
    console.print(table)
    for name, reason in failures.items():
        console.print(f"{name}: not measured: {reason}", markup=False)


def agreement(runs: list[dict[str, Any]], plait: list[dict[str, Any]] | None) -> str:
    """How many requests begin as plait's do. A handful differ by bf16's rounding; most show a wrong setup."""
    if not plait:
        return ""
    pairs = list(zip(runs[0]["first_tokens"], plait[0]["first_tokens"], strict=True))
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def print_where_time_goes(plait: list[dict[str, Any]]) -> None:
    """The parts of a run's time that plait's engine reports, each the median of the runs; what is left is idle."""
    reported = [r for r in plait if r["time"]]
    if not reported:
        return
    seconds = statistics.median(r["seconds"] for r in reported)
    parts = {name: statistics.median(r["time"][name] for r in reported) for name in reported[0]["time"]}
    table = Table(title=f"where plait's {seconds:.2f} s go")
    for heading in ("part", "s", "share"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for name, spent in parts.items():
        table.add_row(name, f"{spent:.3f}", f"{spent / seconds:.1%}")
    rest = seconds - sum(parts.values())
    table.add_row("not accounted for", f"{rest:.3f}", f"{rest / seconds:.1%}")
    Console().print(table)


def plot(title: str, results: Runs, limit: float | None, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    middles = {name: medians(runs) for name, runs in results.items() if runs}
    names = list(middles)[::-1]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 0.45 * len(names) + 1.6), sharey=True)
    speeds = [middles[n]["tokens_per_s"] for n in names]
    bars = left.barh(names, speeds, color=["#1f5fa8" if n.startswith("plait") else "#9aa5b1" for n in names])
    left.bar_label(bars, fmt="%.0f", padding=3)
    if limit:
        left.axvline(limit, color="#b03a2e", linestyle="--", linewidth=1)
        left.set_title(f"tokens per second (the machine's limit: {limit:.0f})", fontsize=10)
        left.set_xlim(0, 1.1 * limit)
    else:
        left.set_title("tokens per second", fontsize=10)
        left.margins(x=0.15)
    keys = (("mean_first_token_s", "first token", "o"), ("mean_latency_s", "mean", "s"))
    for key, label, marker in (*keys, ("p99_latency_s", "p99", "D")):
        right.plot([middles[n][key] for n in names], names, marker, label=label)
    right.set_xlim(left=0)
    right.set_title("seconds from submission", fontsize=10)
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
