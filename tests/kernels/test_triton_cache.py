"""Cache write and block copy in Triton's interpreter, bit for bit against the reference."""

import pytest
import torch
from triton_process import interpreted

from plait.kernels import reference


def written(
    dtype: torch.dtype, kv_heads: int, head_dim: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from plait.kernels import triton_cache

    draw = torch.Generator().manual_seed(1)
    shape = (5, 3, 2, kv_heads, block_size, head_dim)
    pools = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    tokens = 9
    slots = torch.randperm(5 * block_size, generator=draw)[:tokens]
    slots[3] = -1
    fused = torch.randn(tokens, 3 * kv_heads, head_dim, generator=draw).to(dtype)
    k, v = fused[:, kv_heads : 2 * kv_heads], fused[:, 2 * kv_heads :]
    triton_cache.write_kv(pools[0], 2, k, v, slots)
    reference.write_kv(pools[1], 2, k, v, slots)
    return pools[0], pools[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "block_size"), [(3, 64, 16), (2, 80, 32), (1, 128, 16), (10, 256, 16)]
)
def test_write(dtype, kv_heads, head_dim, block_size):
    found, expected = interpreted(written, dtype, kv_heads, head_dim, block_size)
    assert found.equal(expected)
    assert expected.ne(0).any()


def copied(dtype: torch.dtype, pairs: list[list[int]], same: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from plait.kernels import triton_cache

    src = torch.randn(6, 2, 2, 3, 16, 80, generator=torch.Generator().manual_seed(2)).to(dtype)
    table = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)
    results = []
    for copy in (triton_cache.copy_blocks, reference.copy_blocks):
        source = src.clone()
        target = source if same else torch.zeros(4, *src.shape[1:], dtype=dtype)
        copy(source, target, table)
        results.append(target)
    return results[0], results[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("pairs", "same"), [([[5, 0], [2, 3]], False), ([[0, 4], [0, 5], [1, 2]], True), ([], False)]
)
def test_copy(dtype, pairs, same):
    found, expected = interpreted(copied, dtype, pairs, same)
    assert found.equal(expected)


def test_copy_between_pools_that_differ_is_refused():
    from plait.kernels import triton_cache

    with pytest.raises(ValueError, match="differ"):
        triton_cache.copy_blocks(
            torch.zeros(2, 1, 2, 1, 16, 16), torch.zeros(2, 1, 2, 1, 32, 16), torch.tensor([[0, 1]])
        )
