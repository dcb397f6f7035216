"""Swapping on a GPU: are copies right, how fast are they, do they hold up what computes, and what do they gain.

Run from the repository's root; needs torch, triton and transformers. `python benchmarks/device_swap.py` takes less than
a minute and writes device_swap.json to the folder OUT, or to benchmarks/results. `--device cpu` is a dry run of what
needs no GPU, small. Exit code 1 when a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from device_kernels import ROOT, link

link()

import torch  # noqa: E402  after the link, as whatever follows
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from plait.engine.api import GenerationRequest, SamplingParams  # noqa: E402
from plait.engine.assemble import make_scheduler  # noqa: E402
from plait.engine.config import EngineConfig  # noqa: E402
from plait.engine.engine import Engine  # noqa: E402
from plait.engine.movers import make_mover  # noqa: E402
from plait.engine.swap_cost import SwapCosts  # noqa: E402

LLAMA_1B = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
SMALL = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    torch.backends.cuda.matmul.allow_tf32 = False
    report: dict[str, Any] = {"torch": torch.__version__, "failed": []}
    steps = [equality, pressure] if device == "cpu" else [races, bandwidth, overlap, equality, pressure]
    for step in steps:
        began = time.monotonic()
        try:
            report[step.__name__] = step(device)
        except Exception as error:
            report["failed"].append(f"{step.__name__}: {type(error).__name__}: {error}")
        print(f"{step.__name__} ({time.monotonic() - began:.1f} s): {report.get(step.__name__)}", flush=True)
    for line in report["failed"]:
        print("FAILED", line, flush=True)
    if device != "cpu" or "OUT" in os.environ:
        out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
        out.mkdir(parents=True, exist_ok=True)
        (out / "device_swap.json").write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["failed"] else 0


def mover_of(blocks: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A pool of an 8B Llama's blocks, of 2 MiB, and a mover with as many on the host."""
    pool = torch.zeros(blocks, 32, 2, 8, 16, 128, dtype=dtype, device="cuda")
    return make_mover(pool, blocks, SwapCosts(pool[0].numel() * pool.element_size(), 16))


def races(device: str) -> dict[str, Any]:
    """Blocks are overwritten, reused and copied back while computing and copying are far behind the host."""
    mover = mover_of(64)
    pool = mover.pool
    busy = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    seen = torch.zeros(128, 2, device=device)
    for i in range(128):
        block, other, host = i % 16, 16 + i % 7, i % 5
        busy = (busy @ busy).clamp(-1, 1)
        mover.settle([[block]])
        pool[block].fill_(i)
        mover.out([(block, host)])
        mover.settle([[block]])
        pool[block].fill_(-1)
        mover.into([(host, other)])
        if i % 3:
            mover.into([(host, block)])
        mover.settle([[other], [block]])
        seen[i, 0], seen[i, 1] = pool[other].float().max(), pool[block].float().min()
    expected = torch.tensor([[i, i if i % 3 else -1] for i in range(128)], dtype=torch.float32)
    wrong = int((seen.cpu() != expected).any(1).sum())
    if wrong:
        raise AssertionError(f"{wrong} of 128 blocks hold something else than what was written")
    return {"blocks": 128, "wrong": 0}


def bandwidth(device: str) -> dict[str, Any]:
    """GB/s both ways through the mover: blocks in a row, and far from each other."""
    mover = mover_of(384)
    mover.pool.copy_(torch.randint(0, 99, mover.pool.shape[1:], device=device).to(torch.bfloat16))
    before = mover.pool[:256].clone()
    rows = {}
    for name, pairs in {
        "in a row": [(i, i) for i in range(256)],
        "scattered": [(i * 37 % 256, i * 101 % 256) for i in range(256)],
    }.items():
        for _ in range(3):
            times = []
            for move, these in ((mover.out, pairs), (mover.into, [(h, d) for d, h in pairs])):
                torch.cuda.synchronize()
                began = time.perf_counter()
                move(these)
                launched = time.perf_counter()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - began, launched - began))
        size = mover.costs.block_bytes * len(pairs)
        rows[name] = {
            "out_gb_s": round(size / times[0][0] / 1e9, 1),
            "in_gb_s": round(size / times[1][0] / 1e9, 1),
            "host_us_a_block": round(times[0][1] / len(pairs) * 1e6, 1),
        }
        if not torch.equal(mover.pool[:256], before):
            raise AssertionError(f"blocks differ after a round trip, {name}")
    mover.settle([])
    rows["measured_by_the_engine"] = {
        "out_gb_s": round(1e-9 / mover.costs.out.value, 1),
        "in_gb_s": round(1e-9 / mover.costs.into.value, 1),
    }
    return rows


def overlap(device: str) -> dict[str, Any]:
    """Milliseconds of products alone, of copies alone, and of both at once."""
    mover = mover_of(256)
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(24):
            a @ a

    def copies() -> None:
        mover.out([(i, i) for i in range(0, 256, 2)])
        mover.into([(i, i) for i in range(1, 256, 2)])

    def milliseconds(*calls: Any) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize()
        return round((time.perf_counter() - began) * 1e3, 2)

    milliseconds(copies, products)
    alone, copied, both = milliseconds(products), milliseconds(copies), milliseconds(copies, products)
    return {"products_ms": alone, "copies_ms": copied, "both_ms": both}


def make_engine(device: str, config: dict[str, Any], dtype: torch.dtype, **fields: Any) -> Engine:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**config), attn_implementation="plait").eval()
    torch.set_default_dtype(default)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(0, p.shape[-1] ** -0.5)
    engine = Engine(EngineConfig(device=device, **fields), model.requires_grad_(False))
    engine.warm_up()
    return engine


def run(
    engine: Engine, load: list[GenerationRequest], blocks: int, host_blocks: int, **config: Any
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """The loaded engine with a scheduler of its own, over a part of its pools."""
    runner, seats = engine.runner, engine.sampler.owners
    engine.scheduler = make_scheduler(
        EngineConfig(max_running=len(seats), **config),
        blocks,
        runner.device.type,
        engine.clock,
        host_blocks=min(host_blocks, runner.host_blocks),
        mover=runner.mover,
        costs=runner.costs,
    )
    before = engine.stats().time.get("swapping", 0.0)
    began = time.perf_counter()
    done = engine.generate(load)
    seconds = time.perf_counter() - began
    engine.scheduler.check()
    engine.scheduler.kv.check_idle()
    stats = engine.stats()
    return done, {
        "seconds": round(seconds, 3),
        "preemptions": stats.preemptions,
        "swaps": stats.swaps,
        "blocks_out": stats.swapped_out_blocks,
        "blocks_in": stats.swapped_in_blocks,
        "hit_tokens": stats.prefix_hit_tokens,
        "copying_s": round(stats.time.get("swapping", 0.0) - before, 3),
    }


def requests(count: int, prompt: int, tokens: int, shared: int, vocab: int) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(count)
    common = torch.randint(0, vocab, (shared,), generator=generator).tolist()
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return [
        GenerationRequest(
            str(i),
            common + torch.randint(0, vocab, (prompt - shared + i % 16,), generator=generator).tolist(),
            sampling,
        )
        for i in range(count)
    ]


def equality(device: str) -> dict[str, Any]:
    """Greedy, fp32, a random Llama: a pool of a quarter of the need gives the tokens of one that is enough."""
    count = 32 if device == "cuda" else 8
    load = requests(count, 80, 48, 40, 1000)
    need = sum(-(-(len(r.prompt_token_ids) + 48) // 16) for r in load)
    config = LLAMA_1B | SMALL
    engine = make_engine(
        device, config, torch.float32, max_running=count, num_blocks=need + 64, swap_bytes=1 << 28
    )
    expected, calm = run(engine, load, need + 64, 0, preemption="recompute", prefix_cache=False)
    rows = {"enough": calm}
    for prefix in (False, True):
        for mode, host in (("swap", need), ("swap", need // 8), ("recompute", 0), ("auto", need)):
            name = f"{mode}, {host} host blocks, prefix cache {prefix}"
            done, rows[name] = run(
                engine, load, need // 4, host, preemption=mode, prefix_cache=prefix, watermark=0.0
            )
            differing = [i for i in expected if done[i] != expected[i]]
            if differing:
                raise AssertionError(f"{name}: requests {differing} differ from the unpreempted run")
            if (mode, host) == ("swap", need) and not rows[name]["blocks_in"]:
                raise AssertionError(f"{name}: nothing was swapped in")
    return rows


def pressure(device: str) -> dict[str, Any]:
    """Seconds for a load in a quarter of the pool that it needs; twice each, the second time counts."""
    large = device == "cuda"
    count, prompt, tokens = (96, 512, 192) if large else (6, 40, 30)
    vocab = LLAMA_1B["vocab_size"] if large else SMALL["vocab_size"]
    load = requests(count, prompt, tokens, 0, vocab)
    need = sum(-(-(len(r.prompt_token_ids) + tokens) // 16) for r in load)
    dtype = torch.bfloat16 if large else torch.float32
    config = LLAMA_1B if large else LLAMA_1B | SMALL
    engine = make_engine(device, config, dtype, max_running=count, num_blocks=need + 64)
    rows = {"enough": run(engine, load, need + 64, 0, preemption="recompute", prefix_cache=False)[1]}
    for _ in range(2):
        for mode in ("swap", "recompute", "auto"):
            rows[mode] = run(engine, load, need // 4, 1 << 20, preemption=mode, prefix_cache=False)[1]
    costs = engine.runner.costs
    rows["model"] = {
        "recompute_us_a_token": round(costs.recompute(512) / 512 * 1e6, 2),
        "round_trip_us_a_token": round(costs.transfer(1, 1) / costs.block_size * 1e6, 2),
    }
    return rows


if __name__ == "__main__":
    sys.exit(main())
