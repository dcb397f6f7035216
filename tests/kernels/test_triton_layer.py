"""Norm, SiLU and rotary embedding in Triton's interpreter against the reference."""

import pytest
import torch
from triton_process import interpreted

from plait.kernels import reference

# The interpreter cuts bfloat16 off where a device rounds; a chain of three roundings may be three digits apart.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 2e-3}


def draw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    limit = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=limit, rtol=limit)


def normed(dtype: torch.dtype, width: int, adds: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    from plait.kernels import triton_layer

    weight, added = draw(dtype, width), draw(dtype, 5, width) if adds else None
    streams = [draw(dtype, 5, width) * 3 for _ in range(2)]
    outs = [
        f(x, weight, 1e-5, added) for f, x in zip((triton_layer.norm, reference.norm), streams, strict=True)
    ]
    return [tuple(outs), tuple(streams)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "adds"), [(64, False), (576, True), (4096, True)])
def test_norm(dtype, width, adds):
    for found, expected in interpreted(normed, dtype, width, adds):
        close(found, expected)


def activated(dtype: torch.dtype, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    from plait.kernels import triton_layer

    x = draw(dtype, 3, 2 * width) * 4
    return triton_layer.silu_mul(x), reference.silu_mul(x)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [96, 1536])
def test_silu(dtype, width):
    close(*interpreted(activated, dtype, width))


def rotated(dtype: torch.dtype, group: int, kv_heads: int, dim: int, norms: bool) -> list:
    from plait.kernels import triton_layer

    tokens = 7
    angles = draw(torch.float32, tokens, dim // 2).repeat(1, 2) * 3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.randperm(5 * 16, generator=torch.Generator().manual_seed(1))[:tokens]
    slots[3] = -1
    weights = (draw(dtype, dim), draw(dtype, dim) + 1) if norms else None
    results = []
    for module in (triton_layer, reference):
        qkv = draw(dtype, tokens, (group + 2) * kv_heads * dim)
        pool = torch.zeros(5, 3, 2, kv_heads, 16, dim, dtype=dtype)
        results.append((module.rotate_and_write(qkv, pool, 2, slots, cos, sin, weights, 1e-6), pool))
    return list(zip(*results, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("group", "kv_heads", "dim", "norms"),
    [(1, 2, 64, False), (3, 3, 64, True), (4, 2, 128, False), (7, 1, 80, True), (16, 1, 32, False)],
)
def test_rotary_and_write(dtype, group, kv_heads, dim, norms):
    (queries, expected), (pool, expected_pool) = interpreted(rotated, dtype, group, kv_heads, dim, norms)
    close(queries, expected)
    close(pool, expected_pool)
    assert expected_pool.ne(0).any()
    assert pool.eq(0).equal(expected_pool.eq(0)), "a slot was written that is nobody's"
