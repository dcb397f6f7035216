"""One engine over the workload, in a process of its own: `python -m benchmarks.engines NAME [--dtype D]`.

Prints one JSON object: seconds, tokens, tokens per second, and latencies per request in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time

from benchmarks.workload import Item, load


async def plait(items: list[Item], dtype: str, seats: int) -> dict[str, object]:
    from plait.engine.api import GenerationRequest, Output, SamplingParams
    from plait.engine.config import EngineConfig
    from plait.engine.process import EngineProcess

    engine = EngineProcess(EngineConfig(dtype=dtype, max_running=seats))
    await engine.start()
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    tokens = 0
    done = asyncio.Event()

    def on_output(output: Output) -> None:
        nonlocal tokens
        now = time.perf_counter() - begun
        first.setdefault(output.request_id, now)
        tokens += len(output.token_ids)
        if output.finish:
            last[output.request_id] = now
            if len(last) == len(items):
                done.set()

    begun = time.perf_counter()
    for item in items:
        sampling = SamplingParams(max_tokens=item.output_tokens, temperature=0, ignore_eos=True)
        engine.submit(GenerationRequest(item.id, item.prompt, sampling), on_output)
    await done.wait()
    seconds = time.perf_counter() - begun
    await engine.stop()
    return report(seconds, tokens, list(first.values()), list(last.values()), resource.RUSAGE_CHILDREN)


def transformers_static(items: list[Item], dtype: str, batch_size: int = 16) -> dict[str, object]:
    """transformers' generate over left-padded batches, in order; a batch lasts as long as its longest request."""
    import torch
    from transformers import AutoModelForCausalLM

    from plait.engine.models import resolve

    path = resolve("smollm2")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    warm = torch.zeros(1, 4, dtype=torch.long)
    model.generate(
        warm, attention_mask=torch.ones_like(warm), max_new_tokens=2, do_sample=False, pad_token_id=0
    )
    latencies = []
    begun = time.perf_counter()
    for at in range(0, len(items), batch_size):
        batch = items[at : at + batch_size]
        width = max(len(i.prompt) for i in batch)
        ids = torch.tensor([[0] * (width - len(i.prompt)) + i.prompt for i in batch])
        mask = torch.tensor([[0] * (width - len(i.prompt)) + [1] * len(i.prompt) for i in batch])
        longest = max(i.output_tokens for i in batch)
        model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=0)
        latencies += [time.perf_counter() - begun] * len(batch)
    # Only what was asked for counts, not what a request generates while it waits for its batch.
    return report(time.perf_counter() - begun, sum(i.output_tokens for i in items), latencies, latencies)


def report(
    seconds: float, tokens: int, first: list[float], last: list[float], who: int = resource.RUSAGE_SELF
) -> dict[str, object]:
    """`who` holds the model: this process, or its largest child. Peak memory counts the libraries' pages too."""
    ordered = sorted(last)
    return {
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 2),
        "mean_latency_s": round(sum(ordered) / len(ordered), 3),
        "p99_latency_s": round(ordered[max(0, int(len(ordered) * 0.99) - 1)], 3),
        "mean_first_token_s": round(sum(first) / len(first), 3),
        "peak_mib": resource.getrusage(who).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["plait", "transformers-static"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--first", type=int, help="only so many requests")
    args = parser.parse_args()
    items = load(first=args.first)
    if args.engine == "plait":
        result = asyncio.run(plait(items, args.dtype, args.seats))
    else:
        result = transformers_static(items, args.dtype)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
