"""Continuous beside dynamic and static batching, in the same engine, on answers of lognormal length.

`python -m benchmarks.batching [--arrivals poisson]` runs the three in turn (`--runs` times) and writes
`results/batching-<arrivals>.json`; `results/batching.md` shows what is there. SmolLM2 in bf16, CPU. A latency counts
from a request's arrival to its last token.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path

from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
from plait.engine.sequence import Status

KINDS = ("continuous", "dynamic", "static")
RESULTS = Path(__file__).parent / "results"
MEAN, SIGMA, LONGEST = 40, 1.0, 300


def requests(count: int, per_second: float | None) -> list[GenerationRequest]:
    """`arrival` holds seconds after the start."""
    rng, at, made = random.Random(7), 0.0, []
    for number in range(count):
        length = max(1, min(LONGEST, round(MEAN * rng.lognormvariate(-(SIGMA**2) / 2, SIGMA))))
        prompt = [rng.randrange(1000, 40_000) for _ in range(rng.randrange(20, 100))]
        sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0)
        made.append(GenerationRequest(str(number), prompt, sampling, arrival=at))
        at += rng.expovariate(per_second) if per_second else 0.0
    return made


def run(kind: str, seats: int, coming: list[GenerationRequest]) -> dict[str, float]:
    """One engine, from its first request to its last token."""
    config = EngineConfig(
        max_running=seats, batching=kind, batch_window_ms=50, policy="fcfs", kv_cache_bytes=1 << 28
    )
    engine = Engine(config)
    engine.warm_up()
    total, latencies, first = len(coming), [], []
    start = time.monotonic()
    while len(latencies) < total:
        now = time.monotonic()
        while coming and start + coming[0].arrival <= now:
            request = coming.pop(0)
            request.arrival += start
            engine.add(request)
        if not engine.has_work():
            time.sleep(max(0.0, start + coming[0].arrival - now))
            continue
        if pause := engine.scheduler.pause():
            time.sleep(min(pause, max(0.0, start + coming[0].arrival - now) if coming else pause))
        for progress in engine.step():
            if progress.seq.status is Status.FINISHED:
                t = progress.seq.timeline
                latencies.append(t.finished - t.arrived)
                first.append(t.first_token - t.arrived)
    seconds = time.monotonic() - start
    latencies.sort()
    return {
        "tokens_per_s": engine.counters.generated_tokens / seconds,
        "seconds": seconds,
        "mean_latency_s": statistics.mean(latencies),
        "p99_latency_s": latencies[int(0.99 * (total - 1))],
        "mean_first_token_s": statistics.mean(first),
        "prediction_error": engine.stats().prediction_error,
    }


def table(results: dict[str, dict[str, float]]) -> str:
    keys = ("tokens_per_s", "mean_latency_s", "p99_latency_s", "mean_first_token_s")
    lines = [
        "| batching | tokens/s | mean latency s | p99 latency s | mean first token s |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        lines.append(f"| {kind} | " + " | ".join(f"{results[kind][key]:.2f}" for key in keys) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arrivals", choices=("at-once", "poisson"), default="at-once")
    parser.add_argument("--per-second", type=float, default=3.0, help="of the Poisson arrivals")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    rate = args.per_second if args.arrivals == "poisson" else None
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(args.runs):
        for kind in KINDS:
            runs[kind].append(run(kind, args.seats, requests(args.requests, rate)))
            print(kind, {key: round(value, 3) for key, value in runs[kind][-1].items()}, flush=True)
            gc.collect()
    results = {
        kind: {key: statistics.median(r[key] for r in done) for key in done[0]} for kind, done in runs.items()
    }
    record = {"arguments": vars(args), "medians": results, "runs": runs}
    RESULTS.joinpath(f"batching-{args.arrivals}.json").write_text(json.dumps(record, indent=1) + "\n")
    sections = ["# Continuous, dynamic and static batching\n"]
    for path in sorted(RESULTS.glob("batching-*.json")):
        known = json.loads(path.read_text())
        given = known["arguments"]
        sections.append(
            f"{given['requests']} requests, arrivals: {given['arrivals']}"
            + (f", {given['per_second']} a second" if given["arrivals"] == "poisson" else "")
            + f"; {given['seats']} seats; answers lognormal, mean {MEAN} (cut at {LONGEST}), sigma {SIGMA}; "
            f"runs: {given['runs']}. `python -m benchmarks.batching --arrivals {given['arrivals']}`\n\n"
            + table(known["medians"])
            + "\n"
        )
    RESULTS.joinpath("batching.md").write_text("\n".join(sections))


if __name__ == "__main__":
    main()
