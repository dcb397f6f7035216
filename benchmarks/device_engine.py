"""Runs the engine on a GPU: greedy output against transformers' own, then the speed of a random 8B Llama in bf16.

Run from the repository's root; needs torch, triton and transformers. `python benchmarks/device_engine.py` takes about
two minutes and writes device_engine.json to the folder OUT, or to benchmarks/results. `--tiny` measures a small model
(a dry run; with `--device cpu` it needs no GPU, and captures nothing); `--part` runs one of the two; `--unfused` leaves
transformers' own layers; `--profile` prints the kernels that decodes spend their time in. Exit code 1 when an output
differs.

`share` is that of the time in which the bytes of an iteration (weights but for the embedding, and the cache) are read
at the rate of one large sum.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from zlib import crc32

from device_kernels import ROOT, link

link()

import torch  # noqa: E402  after the link, as whatever follows
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from plait.engine import fused  # noqa: E402
from plait.engine.api import GenerationRequest, SamplingParams  # noqa: E402
from plait.engine.config import EngineConfig  # noqa: E402
from plait.engine.engine import Engine  # noqa: E402
from plait.engine.fused import FusedLayers  # noqa: E402
from tiny_families import families  # noqa: E402
from tiny_models import tiny  # noqa: E402

TOKENS = 16
CHECKED = ("llama", "llama-scaled-rope", "qwen2", "qwen3", "gemma2", "gpt-oss", "mistral")
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 1000}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--part", choices=("equality", "speed"))
    parser.add_argument("--unfused", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("plait").setLevel(logging.INFO)
    torch.backends.cuda.matmul.allow_tf32 = False
    with unfused() if arguments.unfused else nullcontext():
        rows = [] if arguments.part == "speed" else equality(arguments.device)
        if rows:
            save({"torch": torch.__version__, "equality": rows}, arguments.device)
        if arguments.part != "equality":
            save(speed(arguments.device, arguments.tiny, arguments.profile), arguments.device)
    return 0 if all(row["equal"] for row in rows) else 1


def save(report: dict[str, Any], device: str) -> None:
    """Into the file, beside what other parts wrote there."""
    if device != "cpu" or "OUT" in os.environ:
        out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
        out.mkdir(parents=True, exist_ok=True)
        file = out / "device_engine.json"
        kept = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(kept | report, indent=1))


def equality(device: str) -> list[dict[str, Any]]:
    """Tiny random models in fp32, 12 mixed prompts in a pool so small that some are preempted, token for token.

    Of one that differs the run without graphs is looked at too, and that without fused layers.
    """
    rows = []
    for name, config in families().items():
        if name not in CHECKED:
            continue
        plain = tiny(config).to(device)
        prompts = [[(7 * i + j * j) % 90 + 1 for j in range(3 + 5 * i)] for i in range(12)]
        wanted = [expected(plain, p, device) for p in prompts]
        row = {"family": name} | differs(device, config, prompts, wanted, graphs=True)
        if not row["equal"]:
            row["eager"] = differs(device, config, prompts, wanted, graphs=False)
            with unfused():
                row["unfused"] = differs(device, config, prompts, wanted, graphs=False)
        rows.append(row)
        print(f"{name:20} {'equal' if row['equal'] else 'DIFFERS'}, {row}", flush=True)
    return rows


def differs(
    device: str, config: Any, prompts: list[list[int]], wanted: list[list[int]], graphs: bool
) -> dict[str, Any]:
    engine = Engine(
        EngineConfig(
            device=device, num_blocks=24, block_size=8, max_running=8, token_budget=32, cuda_graphs=graphs
        ),
        tiny(config, attn="plait").to(device),
    )
    engine.warm_up()
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    got = engine.generate(GenerationRequest(str(i), p, sampling) for i, p in enumerate(prompts))
    wrong = [i for i, tokens in enumerate(wanted) if got[str(i)] != tokens]
    return {
        "equal": not wrong,
        "preemptions": engine.scheduler.preemptions,
        "graphs": engine.runner.graphs.captured,
        "fused": any(isinstance(m, FusedLayers) for m in engine.runner.model.modules()),
        "wrong": wrong,
    }


@contextmanager
def unfused() -> Iterator[None]:
    fuse, fused.fuse = fused.fuse, lambda model: False
    try:
        yield
    finally:
        fused.fuse = fuse


def expected(model: Any, prompt: list[int], device: str) -> list[int]:
    """Greedy, without a cache: no cache implementation can be to blame."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(TOKENS):
            logits = model(torch.tensor([ids], device=device), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def speed(device: str, small: bool, profiles: bool) -> dict[str, Any]:
    config = LlamaConfig(**LLAMA_8B | (SMALL if small else {}))
    rate = read_rate(device, small)
    began = time.monotonic()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="plait").eval()
    torch.set_default_dtype(default)
    model.requires_grad_(False)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding = model.get_input_embeddings().weight
    seats = 16 if small else 256
    engine = Engine(
        EngineConfig(
            device=device,
            max_running=seats,
            token_budget=2048,
            kv_cache_bytes=(1 << 28) * (1 if small else 224),
        ),
        model,
    )
    made = time.monotonic() - began
    engine.warm_up()
    report = {
        "weights_bytes": weights,
        "read_gb_s": rate / 1e9,
        "made_s": made,
        "ready_s": time.monotonic() - began,
        "graphs": engine.runner.graphs.captured,
    }
    print(
        f"weights {weights / 1e9:.2f} GB, {report['read_gb_s']:.0f} GB/s, made after {made:.1f} s, ready after "
        f"{report['ready_s']:.1f} s, {len(report['graphs'])} graphs",
        flush=True,
    )
    read = weights - embedding.numel() * embedding.element_size()
    cached = engine.runner.attention.pool[0].numel() * 2 // engine.runner.block_size
    grid = [(n, context) for n in (1, 8, 16, 64, 256) if n <= seats for context in (128, 1024)]
    decodes = [
        decode(engine, n, context, (read + n * context * cached) / rate, profiles) for n, context in grid
    ]
    return report | {
        "decodes": decodes,
        "prefills": [prefill(engine, n) for n in ((64, 256) if small else (256, 1024, 2048))],
        "load": load(engine, 16 if small else 256, 512, 128, GREEDY),
        "load_random": load(engine, 16 if small else 256, 128, 32, RANDOM),
    }


def read_rate(device: str, small: bool) -> float:
    """Bytes a second of a sum over memory that no cache holds."""
    x = torch.ones((1 << 24) if small else (1 << 30), dtype=torch.float32, device=device)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        float(x.sum())
        times.append(time.perf_counter() - began)
    return x.numel() * 4 / min(times[1:])


GREEDY = {"temperature": 0.0}
RANDOM = {"temperature": 0.8, "top_p": 0.95}


def request(name: str, prompt: int, tokens: int, **sampling: float) -> GenerationRequest:
    ids = torch.randint(
        0, 900, (prompt,), generator=torch.Generator().manual_seed(crc32(name.encode()))
    ).tolist()
    return GenerationRequest(
        name, ids, SamplingParams(max_tokens=tokens, ignore_eos=True, **(sampling or GREEDY))
    )


def decode(
    engine: Engine, count: int, context: int, limit: float, profiles: bool, iterations: int = 24
) -> dict[str, Any]:
    """Median time of an iteration that only decodes, as the engine runs it and without graphs; `limit` in seconds."""
    for i in range(count):
        engine.add(request(f"d{count}-{context}-{i}", context, iterations + 200))
    while engine.scheduler.waiting or any(s.remaining > 1 for s in engine.scheduler.running):
        engine.step()
    times = [timed(engine) for _ in range(iterations)]
    if profiles and context == 1024 and count in (1, 64, 256):
        profile(engine, f"{count} x {context}")
    graphs = engine.runner.graphs
    kept, graphs.captured = graphs.captured, []
    eager = [timed(engine) for _ in range(8)]
    graphs.captured = kept
    for name in list(engine.seqs):
        engine.cancel(name)
    row = {
        "decodes": count,
        "context": context,
        "ms": statistics.median(times) * 1e3,
        "worst_ms": max(times) * 1e3,
        "eager_ms": statistics.median(eager[2:]) * 1e3,
        "limit_ms": limit * 1e3,
    }
    row["share"] = row["limit_ms"] / row["ms"]
    print(
        f"decode {count:4} x {context:5}: {row['ms']:8.2f} ms an iteration (worst {row['worst_ms']:.2f}, eager "
        f"{row['eager_ms']:.2f}); reading alone {row['limit_ms']:.2f}: {row['share']:.0%}",
        flush=True,
    )
    return row


def profile(engine: Engine, name: str) -> None:
    """The kernels of four iterations, by their time on the device."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(4):
            engine.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    rows = [row for row in profiler.key_averages() if row.self_device_time_total > 0]
    rows.sort(key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    print(f"  {name}: {total / 4e3:.2f} ms an iteration in kernels")
    for row in rows[:14]:
        print(
            f"    {row.self_device_time_total / 4:9.1f} us in {row.count / 4:6.1f} of {row.key[:90]}",
            flush=True,
        )


def prefill(engine: Engine, tokens: int) -> dict[str, Any]:
    times = []
    for i in range(6):
        engine.add(request(f"p{tokens}-{i}", tokens - 1, 1))
        times.append(timed(engine))
        while engine.has_work():
            engine.step()
    row = {"tokens": tokens, "ms": statistics.median(times[1:]) * 1e3}
    print(f"prefill {tokens:5}: {row['ms']:8.2f} ms", flush=True)
    return row


def timed(engine: Engine) -> float:
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


def load(engine: Engine, count: int, prompt: int, tokens: int, sampling: dict[str, float]) -> dict[str, Any]:
    """All requests at once: output tokens a second, prefill included."""
    before = dict(engine.stats().time)
    began = time.perf_counter()
    engine.generate(request(f"l{i}", prompt, tokens, **sampling) for i in range(count))
    spent = time.perf_counter() - began
    after = engine.stats().time
    row = {
        "requests": count,
        "prompt": prompt,
        "output": tokens,
        "sampling": sampling,
        "seconds": spent,
        "tokens_s": count * tokens / spent,
        "time": {name: after[name] - before.get(name, 0.0) for name in after},
    }
    print(
        f"load {count} x ({prompt} + {tokens}) {sampling}: {row['tokens_s']:.0f} output tokens/s; {row['time']}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
