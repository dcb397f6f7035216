"""What a dtype costs in quality: `python -m benchmarks.quality` prints perplexities and the times of decodes.

The text is that of the 64 prompts of the workload (English documentation and licences); all tokens but the first of
each are predicted from those before them, through the engine's own runner, one decode an iteration. transformers in
float32 is there to compare with. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time

import torch
from benchmarks.workload import Item, load
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from plait.engine.api import GenerationRequest
from plait.engine.config import EngineConfig
from plait.engine.loader import load as load_model
from plait.engine.models import resolve
from plait.engine.runner import Runner
from plait.engine.sequence import Chunk, Sequence

DTYPES = ("float32", "bfloat16", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--first", type=int, help="only so many of the prompts")
    items = load(first=parser.parse_args().first)
    runners = {}
    report: dict[str, dict[str, float]] = {"transformers float32": {"perplexity": theirs(items)}}
    for dtype in DTYPES:
        config = EngineConfig(dtype=dtype, max_running=len(items), kv_cache_bytes=1 << 29)
        runners[dtype] = Runner(load_model(config), config)
        report[dtype] = {"perplexity": ours(runners[dtype], items)}
    for rows in (1, len(items)):
        times = decode_times(runners, items, rows)
        for dtype in DTYPES:
            report[dtype][f"decode_{rows}_ms"] = round(times[dtype] * 1e3, 2)
    table = Table(title=f"{sum(len(i.prompt) - 1 for i in items)} tokens predicted")
    for heading in ("dtype", "perplexity", "ms, 1 decode", f"ms, {len(items)} decodes"):
        table.add_column(heading, justify="left" if heading == "dtype" else "right")
    for name, row in report.items():
        table.add_row(name, *(f"{x:.3f}" for x in row.values()))
    Console(width=100).print(table)
    print(json.dumps(report))


def theirs(items: list[Item]) -> float:
    model = AutoModelForCausalLM.from_pretrained(resolve("smollm2"), dtype=torch.float32).eval()
    losses = []
    with torch.inference_mode():
        for item in items:
            ids = torch.tensor(item.prompt)
            losses.append(surprise(model(ids[None]).logits[0, :-1], ids[1:]))
    return perplexity(torch.cat(losses))


def ours(runner: Runner, items: list[Item]) -> float:
    seqs = sequences(items)
    losses = []
    for at in range(max(len(i.prompt) for i in items) - 1):
        chunks, wanted = [], []
        for seq, item in zip(seqs, items, strict=True):
            if at + 1 < len(item.prompt):
                seq.tokens = item.prompt[: at + 1]
                chunks.append(Chunk(seq, 1))
                wanted.append(item.prompt[at + 1])
        losses.append(surprise(runner.run(chunks), torch.tensor(wanted)))
        for chunk in chunks:
            chunk.seq.computed += 1
    return perplexity(torch.cat(losses))


def sequences(items: list[Item]) -> list[Sequence]:
    """One seat each, and blocks for the whole prompt."""
    free = iter(range(1 << 30))
    seqs = []
    for seat, item in enumerate(items):
        seq = Sequence.of(GenerationRequest(item.id, item.prompt), 0.0)
        seq.seat, seq.blocks = seat, [next(free) for _ in range(-(-len(item.prompt) // 16))]
        seqs.append(seq)
    return seqs


def surprise(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[N] negative log-likelihoods of tokens [N] by logits [N, V]."""
    return torch.nn.functional.cross_entropy(logits.float(), tokens, reduction="none").double()


def perplexity(losses: torch.Tensor) -> float:
    return round(math.exp(float(losses.mean())), 4)


def decode_times(runners: dict[str, Runner], items: list[Item], rows: int) -> dict[str, float]:
    """Median seconds of an iteration of so many decodes, the dtypes in turn."""
    times: dict[str, list[float]] = {dtype: [] for dtype in runners}
    seqs = sequences(items)[:rows]
    for seq in seqs:
        seq.computed = len(seq.tokens) - 1
    for _ in range(24):
        for dtype, runner in runners.items():
            begun = time.perf_counter()
            runner.run([Chunk(seq, 1) for seq in seqs])
            times[dtype].append(time.perf_counter() - begun)
    return {dtype: statistics.median(spent[4:]) for dtype, spent in times.items()}


if __name__ == "__main__":
    main()
