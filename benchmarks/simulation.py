"""The default policy beside first come, first served, on a trace: `python -m benchmarks.simulation --trace FILE`.

For each policy the load at which 90% of the requests meet all their objectives, by bisection to 1%; urgent requests at
twice the load of `fcfs`; two tenants under `fair` beside the bound of its paper; seconds on one core. Writes
simulation.json, simulation.md and simulation.png to --out. About a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from plait.engine.policies.fair import INPUT, OUTPUT
from plait.engine.sim import profile as profiles
from plait.engine.sim.mix import Class, mix
from plait.engine.sim.run import simulate
from plait.engine.sim.trace import Row, read
from plait.engine.sim.worker import Worker

WANTED = 0.9
CASES = (
    ("fcfs", "off"),
    ("priority", "off"),
    ("fcfs", "predict"),
    ("default", "off"),
    ("default", "predict"),
)
OVERLOADS = (1.0, 1.5, 2.0)


def point(
    rows: Seq[Row], args: argparse.Namespace, policy: str, admission: str, load: float
) -> dict[str, Any]:
    began = time.process_time()
    report = simulate(
        rows,
        profiles.load(args.profile),
        policy=policy,
        workers=args.workers,
        load=load,
        seed=args.seed,
        admission=admission,
    )
    return {"load": load, "core_seconds": time.process_time() - began, **report.flat()}


def load_at(rows: Seq[Row], args: argparse.Namespace, policy: str, admission: str) -> list[dict[str, Any]]:
    """Points around the highest load that attains WANTED, which is the last of them, to 1%."""
    low, high, points = 0.0, args.begin, []
    while True:
        points.append(point(rows, args, policy, admission, high))
        if points[-1]["slo_attainment"] < WANTED:
            break
        low, high = high, high * 1.3
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        points.append(point(rows, args, policy, admission, middle))
        low, high = (middle, high) if points[-1]["slo_attainment"] >= WANTED else (low, middle)
    good = max((p for p in points if p["slo_attainment"] >= WANTED), key=lambda p: p["load"])
    return [*(p for p in points if p is not good), good]


def gap(profile: profiles.Profile, rows: Seq[Row]) -> dict[str, float]:
    """Two tenants with everything there from the start: prompts of the trace, one with answers a quarter as long.

    VTC (arXiv:2401.00588, theorem 4.4): while both are backlogged, their service differs by at most
    2 max(w_in * longest prompt, w_out * tokens of a batch).
    """
    worker = Worker(profile, profile.config(policy="fair"))
    kind = Class("all", 1.0, 4)
    jobs = mix([Row(0.0, r.prompt, r.output) for r in rows], limit=profile.max_tokens_total, classes=(kind,))
    for number, job in enumerate(jobs):
        job.request.tenant = ("short", "long")[number % 2]
        job.output = job.output if number % 2 else max(1, job.output // 4)
    served: Counter[str] = Counter()
    worst, batch, iterations, schedule = 0.0, 0, 0, worker.scheduler.schedule

    def watched() -> Any:
        nonlocal worst, batch, iterations
        chunks = schedule()
        for chunk in chunks:
            served[chunk.seq.tenant] += INPUT * chunk.prompt_tokens + OUTPUT * chunk.samples
        if {"short", "long"} <= {seq.tenant for seq in worker.scheduler.waiting}:
            iterations += 1
            worst = max(worst, abs(served["short"] - served["long"]))
            batch = max(batch, sum(len(seq.tokens) for seq in worker.scheduler.running))
        return chunks

    worker.scheduler.schedule = watched
    worker.run(jobs)
    longest = max(r.prompt for r in rows)
    return {
        "gap": worst,
        "bound": 2 * max(INPUT * longest, OUTPUT * batch),
        "served": sum(served.values()),
        "iterations": iterations,
    }


def table(found: dict[str, Any]) -> str:
    lines = [
        "| policy | admission | load at 90% | beside fcfs | interactive | standard | batch | refused | expired |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = found["at_90"]["fcfs, off"]["load"]
    for name, best in found["at_90"].items():
        shares = [f"{best['classes'][c]['slo_attainment']:.1%}" for c in ("interactive", "standard", "batch")]
        policy, admission = name.split(", ")
        cells = [policy, admission, f"{best['load']:.2f}", f"{best['load'] / base:.2f}", *shares]
        lines.append(f"| {' | '.join([*cells, str(best['refused']), str(best['expired'])])} |")
    lines += ["", "At the load of fcfs's 90% and beyond:", ""]
    lines += [
        "| load | policy | met | interactive met | p99 to first token: interactive | standard | batch |",
        "|---|---|---|---|---|---|---|",
    ]
    for p in found["overload"]:
        late = [p["classes"][c]["ttft_p99"] for c in ("interactive", "standard", "batch")]
        cells = [f"{p['load']:.2f}", p["policy"], f"{p['slo_attainment']:.1%}"]
        cells += [f"{p['classes']['interactive']['slo_attainment']:.1%}"]
        lines.append(f"| {' | '.join(cells + [f'{x:.2f} s' if x else '-' for x in late])} |")
    fair = found["fair"]
    return "\n".join(lines) + (
        f"\n\n`fair`, two tenants, both backlogged for {fair['iterations']} iterations: service differs by at most "
        f"{fair['gap']:.0f}, of {fair['served']:.0f} served; the paper's bound is {fair['bound']:.0f}.\n"
        f"\nSeconds on one core for {found['requests']} requests: {found['core_seconds'][0]:.0f} to "
        f"{found['core_seconds'][1]:.0f}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--profile", default="h100-8b")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--begin", type=float, default=4.0, help="a load that is low enough for all")
    parser.add_argument("--first", type=int, help="only so many requests of the trace")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="simulation")
    args = parser.parse_args()
    rows = read(args.trace)[: args.first]
    with ProcessPoolExecutor() as pool:
        searches = {case: pool.submit(load_at, rows, args, *case) for case in CASES}
        points = {", ".join(case): search.result() for case, search in searches.items()}
        base = points["fcfs, off"][-1]["load"]
        beyond = [
            (policy, admission, base * factor)
            for factor in OVERLOADS
            for policy, admission in (("fcfs", "off"), ("default", "predict"))
        ]
        overload = list(pool.map(point_of, [(rows, args, *case) for case in beyond]))
    cost = [p["core_seconds"] for group in (*points.values(), overload) for p in group]
    found = {
        "trace": args.trace.name,
        "requests": len(rows),
        "profile": args.profile,
        "workers": args.workers,
        "at_90": {name: group[-1] for name, group in points.items()},
        "ratio": points["default, predict"][-1]["load"] / base,
        "overload": [{"policy": case[0], **p} for case, p in zip(beyond, overload, strict=True)],
        "fair": gap(profiles.load(args.profile), rows[:3000]),
        "core_seconds": [min(cost), max(cost)],
        "points": points,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.name}.json").write_text(json.dumps(found, indent=1))
    text = f"# `{args.trace.name}`, {args.workers} x `{args.profile}`\n\n{table(found)}"
    (args.out / f"{args.name}.md").write_text(text)
    draw(args.out / f"{args.name}.png", points)
    print(text)
    print(json.dumps({"ratio": round(found["ratio"], 3)}))


def point_of(case: tuple[Any, ...]) -> dict[str, Any]:
    return point(*case)


def draw(path: Path, points: dict[str, list[dict[str, Any]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, group in points.items():
        line = sorted((p["load"], p["slo_attainment"]) for p in group)
        axes.plot(*zip(*line, strict=True), marker=".", label=name)
    axes.axhline(WANTED, color="gray", linestyle=":", linewidth=1)
    axes.set(xlabel="load, times the trace", ylabel="all objectives met", ylim=(0.5, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(title="policy, admission")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
