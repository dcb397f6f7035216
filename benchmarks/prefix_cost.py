"""What the prefix cache costs when nothing is ever found in it: `python -m benchmarks.prefix_cost`.

SmolLM2 in bf16 over the first requests of the workload, each of a tenant of its own, with the cache and without it in
turn; and the microseconds of scheduler and KV cache for an iteration of 256 decodes. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from benchmarks.workload import load

from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.assemble import make_scheduler
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
from plait.engine.sequence import Sequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--first", type=int, default=24)
    args = parser.parse_args()
    engine = Engine(EngineConfig(dtype="bfloat16"))
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(args.runs):
        for prefix_cache in (number % 2 == 0, number % 2 == 1):
            speeds[prefix_cache].append(tokens_per_s(engine, prefix_cache, args.first))
    costs = {cache: [iteration_us(cache) for _ in range(3)] for cache in (False, True)}
    off, on = statistics.median(speeds[False]), statistics.median(speeds[True])
    pairs = [b / a - 1 for a, b in zip(speeds[False], speeds[True], strict=True)]
    print(
        json.dumps(
            {
                "tokens_per_s_off": speeds[False],
                "tokens_per_s_on": speeds[True],
                "on_over_off": round(on / off, 4),
                "median_of_pairs": round(1 + statistics.median(pairs), 4),
                "iteration_us_off": round(min(costs[False]), 1),
                "iteration_us_on": round(min(costs[True]), 1),
            }
        )
    )


def tokens_per_s(engine: Engine, prefix_cache: bool, first: int) -> float:
    runner = engine.runner
    engine.scheduler = make_scheduler(
        EngineConfig(prefix_cache=prefix_cache),
        runner.num_blocks,
        runner.device.type,
        engine.clock,
        host_blocks=runner.host_blocks,
        mover=runner.mover,
        costs=runner.costs,
    )
    engine.warm_up()
    requests = [
        GenerationRequest(
            i.id,
            i.prompt,
            SamplingParams(max_tokens=i.output_tokens, temperature=0, ignore_eos=True),
            tenant=i.id,
        )
        for i in load(first=first)
    ]
    began = time.perf_counter()
    done = engine.generate(requests)
    spent = time.perf_counter() - began
    assert engine.scheduler.kv.hit_tokens == 0
    return round(sum(map(len, done.values())) / spent, 1)


def iteration_us(prefix_cache: bool, running: int = 256, tokens: int = 320) -> float:
    """Microseconds of schedule and advance, mean over the decodes of one batch, without a model."""
    config = EngineConfig(max_running=running, prefix_cache=prefix_cache, token_budget=running * 64)
    scheduler = make_scheduler(config, running * 32, "cpu", time.monotonic)
    for i in range(running):
        request = GenerationRequest(str(i), [i] * 64, SamplingParams(max_tokens=tokens), tenant=str(i))
        scheduler.add(Sequence.of(request, 0.0))
    spent, iterations = 0.0, 0
    while scheduler.running or len(scheduler.waiting):
        began = time.perf_counter()
        chunks = scheduler.schedule()
        scheduler.advance(chunks)
        if all(chunk.count == 1 for chunk in chunks):
            spent += time.perf_counter() - began
            iterations += 1
        for seq in [chunk.seq for chunk in chunks if chunk.seq.remaining == 0]:
            seq.tokens.append(seq.number + len(seq.tokens))
            if seq.output_len >= tokens:
                scheduler.finish(seq, "length")
    return spent / iterations * 1e6


if __name__ == "__main__":
    main()
