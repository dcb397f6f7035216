"""A KV pool of a quarter of what the load needs: swapping, recomputing and the cost model's choice, in turn.

`python -m benchmarks.preemption` runs SmolLM2 in bf16 over the first requests of the workload, in one process with one
pool, and writes results/preemption.json and .md. The last line is one JSON object of medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.workload import Item, load

from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.assemble import make_scheduler
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine

RESULTS = Path(__file__).with_name("results")
MODES = ("swap", "recompute", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--first", type=int, default=24, help="requests of the workload")
    parser.add_argument("--longest", type=int, default=96, help="output tokens of one request at most")
    parser.add_argument("--prefix-cache", action="store_true", help="what is dropped may still be found")
    args = parser.parse_args()
    items = [replace(i, output_tokens=min(i.output_tokens, args.longest)) for i in load(first=args.first)]
    engine = Engine(EngineConfig(dtype="bfloat16", preemption="swap", prefix_cache=False))
    size = engine.model.block_size
    need = sum(-(-(len(i.prompt) + i.output_tokens) // size) for i in items)
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in ("enough", *MODES)}
    for number in range(args.runs):
        # Each mode is once the first, once the second: a drift meets all.
        order = [MODES[(number + k) % len(MODES)] for k in range(len(MODES))]
        for mode in order:
            runs[mode].append(run(engine, items, mode, need // 4, args.prefix_cache))
            print(f"run {number + 1}: {mode}: {runs[mode][-1]}", flush=True)
        if not number:
            runs["enough"].append(run(engine, items, "recompute", need + 64, args.prefix_cache))
    report(runs, len(items), need, args.prefix_cache)


def run(
    engine: Engine, items: list[Item], preemption: str, blocks: int, prefix_cache: bool
) -> dict[str, Any]:
    """Seconds for all requests, submitted at once; the engine's pool, of which only `blocks` are used."""
    runner = engine.runner
    costs = runner.costs
    engine.scheduler = make_scheduler(
        EngineConfig(preemption=preemption, prefix_cache=prefix_cache),
        blocks,
        runner.device.type,
        engine.clock,
        host_blocks=runner.host_blocks,
        mover=runner.mover,
        costs=costs,
    )
    engine.warm_up()
    requests = [
        GenerationRequest(
            i.id, i.prompt, SamplingParams(max_tokens=i.output_tokens, temperature=0, ignore_eos=True)
        )
        for i in items
    ]
    begun = time.perf_counter()
    done = engine.generate(requests)
    seconds = time.perf_counter() - begun
    assert all(len(done[i.id]) == i.output_tokens for i in items)
    kv = engine.scheduler.kv
    return {
        "seconds": round(seconds, 3),
        "tokens_per_s": round(sum(i.output_tokens for i in items) / seconds, 1),
        "preemptions": engine.scheduler.preemptions,
        "swaps": kv.swaps,
        "blocks_out": kv.store.swapped_out,
        "blocks_in": kv.store.swapped_in,
        "prefill_us_per_token": round(costs.recompute(256) / 256 * 1e6, 1),
        "out_gb_per_s": round(1e-9 / costs.out.value, 2),
        "in_gb_per_s": round(1e-9 / costs.into.value, 2),
    }


def report(runs: dict[str, list[dict[str, Any]]], requests: int, need: int, prefix_cache: bool) -> None:
    medians = {mode: statistics.median(r["seconds"] for r in rows) for mode, rows in runs.items()}
    better = min(medians["swap"], medians["recompute"])
    summary = {**medians, "auto_over_better": round(medians["auto"] / better, 3)}
    name = "preemption-prefix" if prefix_cache else "preemption"
    (RESULTS / f"{name}.json").write_text(json.dumps({"summary": summary, "runs": runs}, indent=1) + "\n")
    lines = [
        f"# {requests} requests in {need // 4} KV blocks, where {need} would be enough",
        "",
        f"SmolLM2-135M, bf16, prefix cache {'on' if prefix_cache else 'off'}; medians of {len(runs['auto'])} "
        "interleaved runs (one with a pool that is enough).",
        "",
        "| preemption | seconds (each run) | tokens/s | preemptions | swapped | blocks out / in |",
        "|---|---|---|---|---|---|",
    ]
    for mode, rows in runs.items():

        def middle(key: str, rows: list[dict[str, Any]] = rows) -> float:
            return statistics.median(r[key] for r in rows)

        each = ", ".join(f"{r['seconds']:.2f}" for r in rows)
        lines.append(
            f"| {mode} | {medians[mode]:.2f} ({each}) | {middle('tokens_per_s'):.1f} | "
            f"{middle('preemptions'):g} | {middle('swaps'):g} | "
            f"{middle('blocks_out'):g} / {middle('blocks_in'):g} |"
        )
    last = runs["auto"][-1]
    lines += [
        "",
        f"auto takes {summary['auto_over_better']:.3f} times what the better of swap and recompute takes. The cost "
        f"model at the end: {last['prefill_us_per_token']} us to compute a token again, copies at "
        f"{last['out_gb_per_s']} GB/s out and {last['in_gb_per_s']} GB/s in.",
    ]
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
