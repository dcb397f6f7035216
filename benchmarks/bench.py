"""`make bench`: plait beside transformers' static batching on one workload, in turn, and beside the limit.

Each engine runs in a process of its own. The last line is one JSON object of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

import torch
from benchmarks import limit
from benchmarks.workload import load
from rich.console import Console
from rich.table import Table

from plait.engine.models import resolve

ENGINES = ("plait", "transformers-static")


def run(engine: str, args: argparse.Namespace) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.engines",
        engine,
        "--dtype",
        args.dtype,
        "--seats",
        str(args.seats),
    ]
    if args.first:
        command += ["--first", str(args.first)]
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **quiet})
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--first", type=int, help="only so many requests of the workload")
    args = parser.parse_args()
    items, dtype = load(first=args.first), getattr(torch, args.dtype)
    path = resolve("smollm2")
    tokens = sum(i.output_tokens for i in items)

    rates, results = [], {engine: [] for engine in ENGINES}
    for number in range(args.runs):
        rates.append(limit.measure(dtype))
        for engine in ENGINES:
            results[engine].append(run(engine, args))
            print(f"run {number + 1}: {engine}: {results[engine][-1]}", file=sys.stderr)
    machine = limit.Machine(
        statistics.median(r.bytes_per_s for r in rates), statistics.median(r.flops for r in rates)
    )
    ideal = limit.ideal_seconds(items, args.seats, limit.shape(path, dtype), machine)

    def middle(engine: str, key: str) -> float:
        return statistics.median(r[key] for r in results[engine])

    keys = ("tokens_per_s", "mean_first_token_s", "mean_latency_s", "p99_latency_s", "peak_mib")
    table = Table(
        title=f"{len(items)} requests, {tokens} tokens to generate, {args.dtype}, medians of {args.runs}"
    )
    for heading in (
        "engine",
        "tokens/s",
        "of the limit",
        "first token s",
        "mean latency s",
        "p99 latency s",
        "peak MiB",
    ):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for engine in ENGINES:
        speed, *rest = (middle(engine, key) for key in keys)
        table.add_row(engine, f"{speed:.1f}", f"{speed * ideal / tokens:.0%}", *(f"{x:.2f}" for x in rest))
    table.add_row("limit", f"{tokens / ideal:.1f}", "100%", "", "", "", "")
    Console(width=110).print(table)
    speeds = {engine: middle(engine, "tokens_per_s") for engine in ENGINES}
    print(
        json.dumps(
            {
                **speeds,
                "limit": round(tokens / ideal, 1),
                "ratio": round(speeds["plait"] / speeds["transformers-static"], 2),
                "read_gb_per_s": round(machine.bytes_per_s / 1e9, 1),
                "gflops": round(machine.flops / 1e9),
            }
        )
    )


if __name__ == "__main__":
    main()
