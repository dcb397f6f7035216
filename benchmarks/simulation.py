"""The default policy beside first come, first served, on a trace: `python -m benchmarks.simulation --trace FILE`.

For `fcfs` and `default` the load at which 90% of the requests meet all their objectives, by bisection to 2%; every
policy at both loads; urgent requests at overload; forecasts beside what came of them; two tenants under `fair` beside
the bound of its paper; seconds on one core. Writes simulation.json, .md and .png to --out. A quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from plait.engine.policies.fair import INPUT, OUTPUT
from plait.engine.sequence import Sequence
from plait.engine.sim import profile as profiles
from plait.engine.sim.mix import Class, mix
from plait.engine.sim.run import simulate
from plait.engine.sim.trace import Row, read
from plait.engine.sim.worker import Worker

WANTED = 0.9
PLAIN, OURS = ("fcfs", "off"), ("default", "predict")
OTHERS = (("fcfs", "predict"), ("priority", "off"), ("slo", "predict"), ("default", "off"))
OVERLOADS = (1.5, 2.0)


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
    spent = time.process_time() - began
    return {"policy": policy, "admission": admission, "load": load, "core_seconds": spent, **report.flat()}


def load_at(rows: Seq[Row], args: argparse.Namespace, policy: str, admission: str) -> list[dict[str, Any]]:
    """Points around the highest load that attains WANTED, which is the last of them, to 2%."""
    low, high, points = 0.0, args.begin, []
    while True:
        points.append(point(rows, args, policy, admission, high))
        if points[-1]["slo_attainment"] < WANTED:
            break
        low, high = high, high * 1.5
    while high - low > 0.02 * high:
        middle = (low + high) / 2
        points.append(point(rows, args, policy, admission, middle))
        low, high = (middle, high) if points[-1]["slo_attainment"] >= WANTED else (low, middle)
    good = max((p for p in points if p["slo_attainment"] >= WANTED), key=lambda p: p["load"])
    return [*(p for p in points if p is not good), good]


def gap(profile: profiles.Profile, rows: Seq[Row]) -> dict[str, float]:
    """Two tenants with everything there from the start: prompts of the trace, one with answers a quarter as long.

    VTC (arXiv:2401.00588, theorem 4.4): over any interval in which both are backlogged their service differs by at most
    2 max(w_in * longest prompt, w_out * tokens of a batch).
    """
    worker = Worker(profile, profile.config(policy="fair"))
    kind = Class("all", 1.0, 4)
    jobs = mix([Row(0.0, r.prompt, r.output) for r in rows], limit=profile.max_tokens_total, classes=(kind,))
    for number, job in enumerate(jobs):
        job.request.tenant = ("short", "long")[number % 2]
        job.output = job.output if number % 2 else max(1, job.output // 4)
    served: Counter[str] = Counter()
    low, high, batch, iterations, schedule = 0.0, 0.0, 0, 0, worker.scheduler.schedule

    def watched() -> Any:
        nonlocal low, high, batch, iterations
        chunks = schedule()
        for chunk in chunks:
            served[chunk.seq.tenant] += INPUT * chunk.prompt_tokens + OUTPUT * chunk.samples
        if {"short", "long"} <= {seq.tenant for seq in worker.scheduler.waiting}:
            iterations += 1
            ahead = served["short"] - served["long"]
            low, high = min(low, ahead), max(high, ahead)
            batch = max(batch, sum(len(seq.tokens) for seq in worker.scheduler.running))
        return chunks

    worker.scheduler.schedule = watched
    worker.run(jobs)
    longest = max(r.prompt for r in rows)
    return {
        "gap": high - low,
        "bound": 2 * max(INPUT * longest, OUTPUT * batch),
        "served": sum(served.values()),
        "iterations": iterations,
    }


def forecasts(profile: profiles.Profile, rows: Seq[Row], loads: Seq[float]) -> list[dict[str, float]]:
    """Seconds to the first token, as admission forecast them when a request came, beside what came of it."""
    found = []
    for load in loads:
        worker = Worker(profile, profile.config(policy="default"))
        seen: dict[int, list[tuple[float, float]]] = {}
        began = worker.admission.began

        def note(seq: Sequence, now: float, seen: Any = seen, began: Any = began) -> None:
            if seq.expected is not None:
                arrived = seq.timeline.arrived
                seen.setdefault(seq.priority, []).append((seq.expected - arrived, now - arrived))
            began(seq, now)

        worker.admission.began = note
        worker.run(mix(rows, limit=profile.max_tokens_total, load=load))
        for priority, pairs in sorted(seen.items(), reverse=True):
            found.append(
                {
                    "load": load,
                    "priority": priority,
                    "requests": len(pairs),
                    "forecast": statistics.median(f for f, _ in pairs),
                    "actual": statistics.median(a for _, a in pairs),
                    "ratio": statistics.median(f / a for f, a in pairs),
                }
            )
    return found


def table(found: dict[str, Any]) -> str:
    classes = ("interactive", "standard", "batch")
    lines = [
        f"90% of the requests meet all their objectives at load {found['fcfs']:.2f} under `fcfs` and at "
        f"{found['default']:.2f} under `default`: **{found['ratio']:.2f} times** the load.",
        "",
        "| load | policy | admission | met | interactive | standard | batch "
        "| p99 to first token: interactive | standard | batch | refused | core seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p in sorted(found["points"], key=lambda p: (p["load"], p["policy"], p["admission"])):
        shares = [f"{p['classes'][c]['slo_attainment']:.1%}" for c in classes]
        late = [f"{x:.2f} s" if (x := p["classes"][c]["ttft_p99"]) else "-" for c in classes]
        cells = [
            f"{p['load']:.2f}",
            p["policy"],
            p["admission"],
            f"{p['slo_attainment']:.1%}",
            *shares,
            *late,
        ]
        cells += [str(p["refused"]), f"{p['core_seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "First tokens of the first 4,000 requests, medians in seconds:", ""]
    lines += [
        "| load | priority | requests | forecast | actual | forecast / actual |",
        "|---|---|---|---|---|---|",
    ]
    for f in found["forecasts"]:
        cells = [f"{f['load']:.2f}", f["priority"], f["requests"]]
        cells += [f"{f[key]:.2f}" for key in ("forecast", "actual", "ratio")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    fair = found["fair"]
    return "\n".join(lines) + (
        f"\n\n`fair`, two tenants, both backlogged for {fair['iterations']} iterations: service differs by at most "
        f"{fair['gap']:.0f}, of {fair['served']:.0f} served; the paper's bound is {fair['bound']:.0f}.\n"
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
        searches = [pool.submit(load_at, rows, args, *case) for case in (PLAIN, OURS)]
        plain, ours = (search.result() for search in searches)
        base, best = plain[-1]["load"], ours[-1]["load"]
        cases = [(*OURS, base), (*PLAIN, best), *((*case, load) for load in (base, best) for case in OTHERS)]
        cases += [(*case, base * factor) for factor in OVERLOADS for case in (PLAIN, OURS)]
        more = list(pool.map(point, *zip(*((rows, args, *case) for case in cases), strict=True)))
    found = {
        "trace": args.trace.name,
        "requests": len(rows),
        "profile": args.profile,
        "workers": args.workers,
        "fcfs": base,
        "default": best,
        "ratio": best / base,
        "forecasts": forecasts(profiles.load(args.profile), rows[:4000], [base, 1.5 * base, 2 * base]),
        "fair": gap(profiles.load(args.profile), rows[:3000]),
        "points": [*plain, *ours, *more],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.name}.json").write_text(json.dumps(found, indent=1))
    text = f"# `{args.trace.name}`, {args.workers} x `{args.profile}`\n\n{table(found)}"
    (args.out / f"{args.name}.md").write_text(text)
    draw(args.out / f"{args.name}.png", found["points"])
    print(text)
    print(json.dumps({"ratio": round(found["ratio"], 3)}))


def draw(path: Path, points: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for case in (PLAIN, *OTHERS, OURS):
        line = sorted(
            (p["load"], p["slo_attainment"]) for p in points if (p["policy"], p["admission"]) == case
        )
        axes.plot(*zip(*line, strict=True), marker=".", label=", ".join(case))
    axes.axhline(WANTED, color="gray", linestyle=":", linewidth=1)
    axes.set(xlabel="load, times the trace", ylabel="all objectives met", ylim=(0.5, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(title="policy, admission")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
