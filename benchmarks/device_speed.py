"""Time of the Triton kernels, beside measured limits of memory and matrix products.

Kernels are timed inside CUDA graphs, as the engine runs decodes: outside, the host's time to launch them shows instead.
Keys and values of small cases stay in the device's cache between the calls.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench, do_bench_cudagraph

from plait.kernels import triton_attention, triton_cache
from plait.kernels.batch import Batch

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Heads:
    q: int
    kv: int
    dim: int


LLAMA, SMOL, OSS, GEMMA = Heads(32, 8, 128), Heads(9, 3, 64), Heads(64, 8, 64), Heads(8, 4, 256)
DECODES = {
    "llama-3-8b 1 x 32768": (LLAMA, [32768], {}),
    "llama-3-8b 8 x 4096": (LLAMA, [4096] * 8, {}),
    "llama-3-8b 64 x 2048": (LLAMA, [2048] * 64, {}),
    "llama-3-8b 256 x 1024": (LLAMA, [1024] * 256, {}),
    "llama-3-8b 1 x 32768 among 63 x 300": (LLAMA, [300] * 63 + [32768], {}),
    "smollm2 64 x 300": (SMOL, [300] * 64, {}),
    "smollm2 256 x 1024": (SMOL, [1024] * 256, {}),
    "gpt-oss 64 x 2048": (OSS, [2048] * 64, {"sinks": True}),
    "gpt-oss 64 x 8192 window 128": (OSS, [8192] * 64, {"sinks": True, "window": 128}),
    "gemma-2 64 x 2048 softcap": (GEMMA, [2048] * 64, {"softcap": 50.0}),
}
PREFILLS = {
    "llama-3-8b 1 x 8192": (LLAMA, [(8192, 8192)], {}),
    "llama-3-8b 8 x 1024": (LLAMA, [(1024, 1024)] * 8, {}),
    "llama-3-8b chunk 2048 of 16384": (LLAMA, [(2048, 16384)], {}),
    "smollm2 8 x 1024": (SMOL, [(1024, 1024)] * 8, {}),
    "gpt-oss 1 x 8192 window 128": (OSS, [(8192, 8192)], {"sinks": True, "window": 128}),
    "gemma-2 1 x 4096 softcap": (GEMMA, [(4096, 4096)], {"softcap": 50.0}),
    "mixed: 63 x 1024 decodes, chunk 512": (LLAMA, [(1, 1024)] * 63 + [(512, 512)], {}),
}


def measure(only: str = "") -> dict:
    """All cases, or those with a regular expression in their names."""
    limits = _limits()
    print(
        f"limits: {limits['read_gb_s']:.0f} GB/s read, {limits['bf16_tflop_s']:.0f} TFLOP/s bf16", flush=True
    )
    return {
        "limits": limits,
        "decode": [_decode(name, limits, *row) for name, row in DECODES.items() if re.search(only, name)],
        "prefill": [_prefill(name, limits, *row) for name, row in PREFILLS.items() if re.search(only, name)],
        "cache": [] if only else _cache(limits),
        "host_us_per_call": _host_time(),
    }


def _milliseconds(call) -> float:
    """In a graph of many calls."""
    return do_bench_cudagraph(call, rep=40, return_mode="median")


def _alone(call) -> float:
    """By itself, with nothing in the device's cache."""
    return do_bench(call, warmup=20, rep=80, return_mode="median")


def _limits() -> dict:
    big = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    read = big.numel() * 4 / _alone(lambda: big.max()) / 1e6
    copied = torch.empty_like(big)
    copy = big.numel() * 8 / _alone(lambda: copied.copy_(big)) / 1e6
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    products = 2 * 8192**3 / _alone(lambda: a @ b) / 1e9
    return {"read_gb_s": max(read, copy), "copy_gb_s": copy, "bf16_tflop_s": products}


def _batch(
    heads: Heads, chunks: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16
) -> tuple[Batch, Tensor]:
    needed = [-(-length // BLOCK_SIZE) for _, length in chunks]
    pool = torch.randn(sum(needed), 2, 2, heads.kv, BLOCK_SIZE, heads.dim, device="cuda", dtype=dtype)
    order = torch.randperm(sum(needed), dtype=torch.int32).split(needed)
    tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).cuda()
    starts = torch.tensor([0] + [chunk for chunk, _ in chunks]).cumsum(0)
    tokens = int(starts[-1])
    batch = Batch(
        query_start=starts.int().cuda(),
        seq_lens=torch.tensor([length for _, length in chunks], dtype=torch.int32, device="cuda"),
        block_tables=tables,
        slots=torch.randperm(sum(needed) * BLOCK_SIZE, device="cuda")[:tokens],
        pool=pool,
        max_query=max(chunk for chunk, _ in chunks),
        max_seq=max(length for _, length in chunks),
        num_decodes=sum(chunk == 1 for chunk, _ in chunks),
    )
    return batch, torch.randn(tokens, heads.q, heads.dim, device="cuda", dtype=dtype)


def _call(heads: Heads, batch: Batch, q: Tensor, options: dict):
    options = {"scale": heads.dim**-0.5} | options
    if "sinks" in options:
        options["sinks"] = torch.randn(heads.q, device="cuda", dtype=q.dtype)
    return lambda: triton_attention.paged_attention(q, batch, 1, **options)


def _decode(name: str, limits: dict, heads: Heads, lengths: list[int], options: dict) -> dict:
    batch, q = _batch(heads, [(1, length) for length in lengths])
    took = _milliseconds(_call(heads, batch, q, options))
    keys = sum(min(length, options.get("window", length)) for length in lengths)
    rate = (keys * heads.kv * heads.dim * 4 + 4 * q.numel()) / took / 1e6
    share = rate / limits["read_gb_s"]
    print(
        f"decode  {name:40} {took * 1e3:9.1f} us {rate:7.0f} GB/s   {share:4.0%} of the read limit",
        flush=True,
    )
    return {"name": name, "us": took * 1e3, "gb_s": rate, "share": share}


def _prefill(name: str, limits: dict, heads: Heads, chunks: list[tuple[int, int]], options: dict) -> dict:
    batch, q = _batch(heads, chunks)
    took = _milliseconds(_call(heads, batch, q, options))
    window = options.get("window", 1 << 30)
    seen = sum(min(p + 1, window) for chunk, length in chunks for p in range(length - chunk, length))
    rate = 4 * seen * heads.q * heads.dim / took / 1e9
    record = {"name": name, "us": took * 1e3, "tflop_s": rate, "share": rate / limits["bf16_tflop_s"]}
    line = f"prefill {name:40} {took * 1e3:9.1f} us {rate:7.1f} TFLOP/s"
    line += f" {record['share']:4.0%} of the product limit"
    if not options and len(set(chunks)) == 1 and chunks[0][0] == chunks[0][1]:
        record["sdpa_us"] = _sdpa(heads, len(chunks), chunks[0][0]) * 1e3
        line += f"; torch SDPA, contiguous: {record['sdpa_us']:.1f} us"
    print(line, flush=True)
    return record


def _sdpa(heads: Heads, count: int, length: int) -> float:
    def part(number: int) -> Tensor:
        return torch.randn(count, number, length, heads.dim, device="cuda", dtype=torch.bfloat16)

    q, k, v = part(heads.q), part(heads.kv), part(heads.kv)
    k, v = (x.repeat_interleave(heads.q // heads.kv, 1) for x in (k, v))
    return _milliseconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))


def _cache(limits: dict) -> list[dict]:
    batch, _ = _batch(LLAMA, [(4096, 4096)] * 4)
    k, v = torch.randn(2, 16384, LLAMA.kv, LLAMA.dim, device="cuda", dtype=torch.bfloat16)
    written = _milliseconds(lambda: triton_cache.write_kv(batch.pool, 1, k, v, batch.slots))
    blocks = torch.randperm(len(batch.pool), device="cuda", dtype=torch.int32).view(-1, 2)
    copied = _milliseconds(lambda: triton_cache.copy_blocks(batch.pool, batch.pool, blocks))
    host = torch.empty_like(batch.pool, device="cpu").pin_memory()
    swapped = _milliseconds(lambda: triton_cache.copy_blocks(batch.pool, host, blocks))
    size = len(blocks) * batch.pool[0].numel() * 2
    records = []
    for name, took, moved in (
        ("write 16384 tokens", written, 8 * k.numel()),
        (f"copy {len(blocks)} blocks", copied, 2 * size),
        (f"copy {len(blocks)} blocks to the host", swapped, size),
    ):
        rate = moved / took / 1e6
        share = rate / limits["copy_gb_s"]
        print(f"cache   {name:40} {took * 1e3:9.1f} us {rate:7.0f} GB/s   {share:4.0%} of copy", flush=True)
        records.append({"name": name, "us": took * 1e3, "gb_s": rate})
    return records


def _host_time() -> float:
    """What one call of the attention costs the CPU, in microseconds."""
    batch, q = _batch(SMOL, [(1, 100)] * 8)
    call = _call(SMOL, batch, q, {})
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(200):
        call()
    spent = (time.perf_counter() - began) / 200 * 1e6
    torch.cuda.synchronize()
    print(f"host    {spent:.0f} us a call", flush=True)
    return spent
