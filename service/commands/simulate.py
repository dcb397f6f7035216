"""`plait simulate`: a trace of requests through the real scheduler, on a simulated clock and device."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from plait.engine.sim.report import Report, Summary


def command(
    trace: Annotated[
        Path,
        typer.Option("--trace", "-t", help="CSV: TIMESTAMP,ContextTokens,GeneratedTokens."),
    ],
    workers: Annotated[
        int, typer.Option("--workers", "-w", min=1, help="Requests are spread by a hash of their ids.")
    ] = 1,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="default is what a worker runs that was told nothing.")
    ] = "default",
    load: Annotated[
        float, typer.Option("--load", min=0.001, help="Arrival times are divided by this.")
    ] = 1.0,
    profile: Annotated[
        str, typer.Option("--profile", help="The device: a shipped profile, or a TOML file.")
    ] = "h100-8b",
    seed: Annotated[int, typer.Option("--seed", help="Of the classes and tenants of requests.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE.png|.svg",
            dir_okay=False,
            help="Draw attainment over load, up to twice --load.",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", dir_okay=False, help="What the first worker does, for `plait trace-view`."),
    ] = None,
    admission: Annotated[
        str, typer.Option("--admission", help="auto, predict or off: as a worker's setting.")
    ] = "auto",
    compare: Annotated[
        list[str] | None, typer.Option("--compare", help="A further policy in the plot; default: fcfs.")
    ] = None,
) -> None:
    """What a policy would do with a trace of requests: objectives met, times, preemptions, refusals."""
    from plait.engine.policies import policy_class
    from plait.engine.recorder import Recorder
    from plait.engine.sim import profile as profiles
    from plait.engine.sim.run import simulate
    from plait.engine.sim.trace import read

    policies = [policy, *(compare or ["fcfs"] if plot else [])]
    try:
        for name in policies:
            policy_class(name)
        device = profiles.load(profile)
        device.config(admission=admission)
        rows = read(trace)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    if plot is not None:
        from plait.service.plots import check_target

        check_target(plot)
    recorder = Recorder() if record else None
    common: dict[str, Any] = {"workers": workers, "seed": seed, "admission": admission}
    report = simulate(rows, device, policy=policy, load=load, recorder=recorder, **common)
    if recorder and record:
        recorder.write(record)
    given = {"policy": policy, "load": load, "profile": profile, **common}
    if as_json:
        print(json.dumps({**given, **report.flat()}))
    else:
        _show(report, given)
    if plot is not None:
        from plait.engine.sim.run import sweep
        from plait.service.plots import draw_attainment

        loads = [load * share for share in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)]
        names = list(dict.fromkeys(policies))
        curves = sweep(rows, device, policies=names, loads=loads, **common)
        draw_attainment(
            plot, {name: [asdict(r.overall) for r in curve] for name, curve in curves.items()}, loads
        )


def _show(report: Report, given: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=" ".join(f"{key}={value}" for key, value in given.items()))
    for heading in (
        *("", "requests", "met", "TTFT p50", "p99", "TPOT p50", "p99", "total p50", "p99"),
        *("preempted", "refused", "expired"),
    ):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, summary in {**report.classes, "all": report.overall}.items():
        table.add_row(name, *_cells(summary))
    console = Console(width=max(140, Console().width))
    console.print(table)
    console.print(
        f"goodput {report.goodput:.2f} requests/s over {report.seconds:.0f} s; {report.iterations} iterations; "
        f"devices computed {report.utilization:.0%} of the time",
        highlight=False,
    )


def _cells(s: Summary) -> list[str]:
    def say(seconds: float | None, unit: str = "s") -> str:
        if seconds is None:
            return "-"
        return f"{seconds * 1000:.1f} ms" if unit == "ms" else f"{seconds:.2f} s"

    return [
        str(s.requests),
        f"{s.slo_attainment:.1%}",
        say(s.ttft_p50),
        say(s.ttft_p99),
        say(s.tpot_p50, "ms"),
        say(s.tpot_p99, "ms"),
        say(s.latency_p50),
        say(s.latency_p99),
        str(s.preemptions),
        str(s.refused),
        str(s.expired),
    ]
