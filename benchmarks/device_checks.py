"""The Triton kernels against the reference on a device, over the shapes of known model families."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from ragged import Layout, build
from triton_process import repair_bfloat16

from plait.kernels import reference, triton_attention, triton_cache, triton_layer

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SMALL = ((1, 1), (1, 40), (1, 70), (33, 33), (9, 50), (2, 2))
LARGE = ((1, 1), (1, 700), (1, 64), (1, 4097), (300, 300), (129, 1500), (2, 2), (64, 640), (1000, 1000))
LONG = ((1, 9000), (1, 8192))


def run_checks(device: str, only: str = "") -> list[dict]:
    """One record per check: its name, the largest difference (relative to 1 + |expected|), its limit, ok.

    With `only`, those with this regular expression in their names, in bf16.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    large = device == "cuda"
    if not large:
        repair_bfloat16()
    chunks = LARGE if large else SMALL
    families = {
        "smollm2": Layout(chunks, 9, 3, 64),
        "llama-3-8b": Layout(chunks, 32 if large else 8, 8 if large else 2, 128),
        "llama-3-8b, blocks of 32": Layout(chunks, 8, 2, 128, block_size=32),
        "gemma-2-9b": Layout(chunks, 4, 2, 256, window=1024 if large else 20, softcap=50.0),
        "gpt-oss": Layout(chunks, 16, 2, 64, window=128 if large else 16, sinks=True),
        "gpt-oss, full": Layout(chunks, 16, 2, 64, sinks=True),
        "phi-2": Layout(chunks, 4, 4, 80),
        "head 96": Layout(chunks, 6, 2, 96, window=33),
        "head 16": Layout(chunks, 4, 2, 16),
        "one kv head, 48 heads": Layout(chunks, 48, 1, 64),
    }
    if large:
        families |= {
            "few long decodes": Layout(LONG, 8, 2, 128),
            "few long decodes, sinks, window": Layout(LONG, 8, 2, 64, sinks=True, window=4096),
            "few long decodes, softcap": Layout(LONG, 4, 2, 256, softcap=30.0),
        }
    records = []
    for dtype in (torch.bfloat16,) if only else TOLERANCE:
        checks: dict[str, Callable[[], dict]] = {
            f"attention {name}": partial(_attention, name, replace(layout, dtype=dtype), device)
            for name, layout in families.items()
        }
        checks["cache write"] = partial(_write, device, dtype)
        checks["block copy"] = partial(_copy, device, dtype, host=False)
        checks["layer norm"] = partial(_norm, device, dtype)
        checks["layer silu"] = partial(_silu, device, dtype)
        for group, dim, normed in ((4, 128, False), (3, 64, False), (7, 80, True), (8, 128, True)):
            name = f"layer rotary, {group} x {dim}{', normed' * normed}"
            checks[name] = partial(_rotary, name, device, dtype, group, dim, normed)
        if large:
            checks["block copy to the host"] = partial(_copy, device, dtype, host=True)
            checks["decode in a CUDA graph"] = partial(_graph, dtype)
        records += [check() for name, check in checks.items() if re.search(only, name)]
    return records


def _attention(name: str, layout: Layout, device: str) -> dict:
    case = build(layout, device)
    found, expected = case.run(triton_attention.paged_attention), case.run(reference.paged_attention)
    return _record(f"attention {name}", layout.dtype, found, expected, TOLERANCE[layout.dtype])


def _norm(device: str, dtype: torch.dtype) -> dict:
    weight, added = torch.randn(4096, device=device).to(dtype), torch.randn(9, 4096, device=device).to(dtype)
    streams = [added * 3 + 1 for _ in range(2)]
    results = [
        torch.cat([module.norm(x, weight, 1e-5, added), x])
        for module, x in zip((triton_layer, reference), streams, strict=True)
    ]
    return _record("layer norm", dtype, *results, TOLERANCE[dtype])


def _silu(device: str, dtype: torch.dtype) -> dict:
    x = torch.randn(9, 2 * 1536, device=device).to(dtype) * 3
    return _record("layer silu", dtype, triton_layer.silu_mul(x), reference.silu_mul(x), TOLERANCE[dtype])


def _rotary(name: str, device: str, dtype: torch.dtype, group: int, dim: int, normed: bool) -> dict:
    kv_heads, tokens = 2, 33
    angles = torch.randn(tokens, dim // 2, device=device).repeat(1, 2) * 3
    slots = torch.randperm(160, device=device)[:tokens]
    slots[::7] = -1
    weights = tuple(torch.randn(2, dim, device=device).to(dtype)) if normed else None
    qkv = torch.randn(tokens, (group + 2) * kv_heads * dim, device=device).to(dtype)
    results = []
    for module in (triton_layer, reference):
        pool = torch.zeros(10, 3, 2, kv_heads, 16, dim, dtype=dtype, device=device)
        turned = (angles.cos().to(dtype), angles.sin().to(dtype))
        q = module.rotate_and_write(qkv.clone(), pool, 1, slots, *turned, weights, 1e-6)
        results.append(torch.cat([q.flatten(), pool.flatten()]))
    # Three roundings, which the interpreter makes by cutting off.
    return _record(name, dtype, *results, 2 * TOLERANCE[dtype])


def _record(name: str, dtype: torch.dtype, found: torch.Tensor, expected: torch.Tensor, limit: float) -> dict:
    expected = expected.float()
    difference = float(((found.float() - expected).abs() / (1 + expected.abs())).max())
    ok = difference <= limit
    if not ok:
        print(f"FAILED {name} {dtype}: differs by {difference:.3g}, may by {limit:.3g}", flush=True)
    return {"name": name, "dtype": str(dtype), "difference": difference, "limit": limit, "ok": ok}


def _write(device: str, dtype: torch.dtype) -> dict:
    pools = [torch.zeros(40, 3, 2, 4, 16, 80, dtype=dtype, device=device) for _ in range(2)]
    slots = torch.randperm(640, device=device)[:100]
    slots[::7] = -1
    k, v = torch.randn(100, 12, 80, device=device).to(dtype)[:, 4:].chunk(2, 1)
    triton_cache.write_kv(pools[0], 1, k, v, slots)
    reference.write_kv(pools[1], 1, k, v, slots)
    return _record("cache write", dtype, *pools, 0.0)


def _copy(device: str, dtype: torch.dtype, host: bool) -> dict:
    """With `host` out to pinned memory, as for swapping."""
    src = torch.randn(12, 4, 2, 2, 16, 80, device=device).to(dtype)
    pairs = torch.tensor([[3, 1], [11, 0], [0, 7]], dtype=torch.int32, device=device)
    results = []
    for copy in (triton_cache.copy_blocks, reference.copy_blocks):
        target = torch.zeros(8, *src.shape[1:], dtype=dtype, device="cpu" if host else device)
        target = target.pin_memory() if host else target
        copy(src, target, pairs)
        results.append(target)
    if host:
        torch.cuda.synchronize()
    return _record("block copy to the host" if host else "block copy", dtype, *results, 0.0)


def _graph(dtype: torch.dtype) -> dict:
    """Decodes captured in a CUDA graph follow the lengths and tables that lie in memory at replay.

    Replayed for other lengths than it was captured for, so that they are cut otherwise; one is empty.
    """
    case = build(Layout(((1, 9000), (1, 400), (1, 30), (1, 700)), 8, 2, 128, dtype=dtype), "cuda")
    case.run(triton_attention.paged_attention)
    case.batch.plans.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(triton_attention.paged_attention)
    results = []
    for lengths in ((8983, 300, 30, 0), (17, 400, 1, 700), (9000, 1, 2, 3)):
        case.batch.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        results += [out.clone(), case.run(reference.paged_attention)]
    return _record(
        "decode in a CUDA graph", dtype, torch.cat(results[::2]), torch.cat(results[1::2]), TOLERANCE[dtype]
    )
