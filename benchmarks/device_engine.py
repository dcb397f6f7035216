"""Runs the engine on a GPU: greedy output against transformers' own, then the speed of a random 8B Llama in bf16.

Run from the repository's root; needs torch, triton and transformers. `python benchmarks/device_engine.py` takes about
two minutes and writes device_engine.json to the folder OUT, or to benchmarks/results. `--tiny` measures a small model
(a dry run; with `--device cpu` it needs no GPU). Exit code 1 when an output differs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from zlib import crc32

from device_kernels import ROOT, link

link()

import torch  # noqa: E402  after the link, as whatever follows
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from plait.engine.api import GenerationRequest, SamplingParams  # noqa: E402
from plait.engine.config import EngineConfig  # noqa: E402
from plait.engine.engine import Engine  # noqa: E402
from tiny_families import families  # noqa: E402
from tiny_models import tiny  # noqa: E402

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
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    report: dict[str, Any] = {"torch": torch.__version__, "equality": equality(arguments.device)}
    save(report, arguments.device)
    report |= speed(arguments.device, arguments.tiny)
    save(report, arguments.device)
    return 0 if all(row["equal"] for row in report["equality"]) else 1


def save(report: dict[str, Any], device: str) -> None:
    if device != "cpu" or "OUT" in os.environ:
        out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
        out.mkdir(parents=True, exist_ok=True)
        (out / "device_engine.json").write_text(json.dumps(report, indent=1))


def equality(device: str) -> list[dict[str, Any]]:
    """Tiny random models in fp32, 12 mixed prompts in a pool so small that some are preempted, token for token."""
    rows = []
    for name, config in families().items():
        if name not in CHECKED:
            continue
        engine = Engine(
            EngineConfig(device=device, num_blocks=24, block_size=8, max_running=8, token_budget=32),
            tiny(config, attn="plait").to(device),
        )
        plain = tiny(config).to(device)
        prompts = [[(7 * i + j * j) % 90 + 1 for j in range(3 + 5 * i)] for i in range(12)]
        sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        got = engine.generate(GenerationRequest(str(i), p, sampling) for i, p in enumerate(prompts))
        wrong = [i for i, p in enumerate(prompts) if got[str(i)] != expected(plain, p, device)]
        rows.append({"family": name, "equal": not wrong, "preemptions": engine.scheduler.preemptions})
        print(f"{name:20} {'equal' if not wrong else f'DIFFERS in {wrong}'}, {rows[-1]}", flush=True)
    return rows


def expected(model: Any, prompt: list[int], device: str) -> list[int]:
    """Greedy, without a cache: no cache implementation can be to blame."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(24):
            logits = model(torch.tensor([ids], device=device), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def speed(device: str, small: bool) -> dict[str, Any]:
    config = LlamaConfig(**LLAMA_8B | (SMALL if small else {}))
    began = time.monotonic()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="plait").eval()
    torch.set_default_dtype(default)
    model.requires_grad_(False)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
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
    engine.warm_up()
    print(f"weights {weights / 1e9:.2f} GB, ready after {time.monotonic() - began:.1f} s", flush=True)
    grid = [(n, context) for n in (1, 8, 16, 64, 256) if n <= seats for context in (128, 1024)]
    decodes = [decode(engine, n, context) for n, context in grid]
    return {
        "weights_bytes": weights,
        "decodes": decodes,
        "prefills": [prefill(engine, n) for n in ((64, 256) if small else (256, 1024, 2048))],
        "load": load(engine, 16 if small else 256, 512, 128),
    }


def request(name: str, prompt: int, tokens: int) -> GenerationRequest:
    ids = torch.randint(
        0, 900, (prompt,), generator=torch.Generator().manual_seed(crc32(name.encode()))
    ).tolist()
    return GenerationRequest(name, ids, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))


def decode(engine: Engine, count: int, context: int, iterations: int = 24) -> dict[str, Any]:
    """Median seconds of an iteration that only decodes."""
    for i in range(count):
        engine.add(request(f"d{count}-{context}-{i}", context, iterations + 200))
    while engine.scheduler.waiting or any(s.remaining > 1 for s in engine.scheduler.running):
        engine.step()
    times = [timed(engine) for _ in range(iterations)]
    for name in list(engine.seqs):
        engine.cancel(name)
    row = {
        "decodes": count,
        "context": context,
        "ms": statistics.median(times) * 1e3,
        "worst_ms": max(times) * 1e3,
    }
    print(f"decode {count:4} x {context:5}: {row['ms']:8.2f} ms an iteration", flush=True)
    return row


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


def load(engine: Engine, count: int, prompt: int, tokens: int) -> dict[str, Any]:
    """All requests at once: output tokens a second, prefill included."""
    before = dict(engine.stats().time)
    began = time.perf_counter()
    engine.generate(request(f"l{i}", prompt, tokens) for i in range(count))
    spent = time.perf_counter() - began
    after = engine.stats().time
    row = {
        "requests": count,
        "prompt": prompt,
        "output": tokens,
        "seconds": spent,
        "tokens_s": count * tokens / spent,
        "time": {name: after[name] - before.get(name, 0.0) for name in after},
    }
    print(
        f"load {count} x ({prompt} + {tokens}): {row['tokens_s']:.0f} output tokens/s; {row['time']}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
