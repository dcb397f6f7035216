"""The compiled CPU kernels against the torch reference."""

import pytest
import torch

from plait.kernels.attention import PagedAttention
from plait.kernels.batch import Batch
from plait.kernels.linear import PackedLinear


def ragged(chunks, contexts, *, heads, kv_heads, dim, block_size=16, layers=2, dtype=torch.float32, seed=0):
    """Two equal pools (compiled and reference), filled with contexts, and the next iteration's batch and tensors."""
    gen = torch.Generator().manual_seed(seed)
    lens = [c + n for c, n in zip(contexts, chunks, strict=True)]
    blocks = [-(-n // block_size) for n in lens]
    order = torch.randperm(sum(blocks) + 3, generator=gen).tolist()
    tables = torch.full((len(lens), max(blocks)), -1, dtype=torch.int32)
    for i, n in enumerate(blocks):
        tables[i, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)

    def batch(pool, starts, stops):
        counts = [b - a for a, b in zip(starts, stops, strict=True)]
        slots = [
            int(tables[i, p // block_size]) * block_size + p % block_size
            for i, (a, b) in enumerate(zip(starts, stops, strict=True))
            for p in range(a, b)
        ]
        return Batch(
            query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(stops, dtype=torch.int32),
            block_tables=tables,
            slots=torch.tensor(slots),
            pool=pool,
            max_query=max(counts),
            max_seq=max(stops),
            num_decodes=0,
        )

    def rows(n, h):
        return torch.randn(n, h, dim, generator=gen).to(dtype)

    pools = [
        torch.zeros(sum(blocks) + 3, layers, 2, kv_heads, block_size, dim, dtype=dtype) for _ in range(2)
    ]
    ways = [PagedAttention(pools[0], heads), PagedAttention(pools[1], heads, plain=True)]
    assert [w.backend for w in ways] == ["cpu", "torch"]
    past = [rows(sum(contexts), kv_heads) for _ in range(2)]
    k, v, q = rows(sum(chunks), kv_heads), rows(sum(chunks), kv_heads), rows(sum(chunks), heads)
    for way in ways:
        if sum(contexts):
            way.begin(batch(way.pool, [0] * len(lens), contexts))
            way.write(1, *past)
        way.begin(batch(way.pool, contexts, lens))
        way.write(1, k, v)
    return ways, q


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads,kv_heads,dim", [(9, 3, 64), (4, 4, 16), (8, 1, 128), (5, 1, 80), (2, 2, 256)])
def test_mixed_chunks_and_decodes(heads, kv_heads, dim, dtype):
    (ours, plain), q = ragged(
        [1, 1, 7, 40, 1, 17], [5, 31, 0, 20, 64, 16], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype
    )
    got = ours.attend(1, q, scale=dim**-0.5)
    want = plain.attend(1, q, scale=dim**-0.5)
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 1, 5, 16, 33])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("block_size", [16, 32])
def test_window_softcap_and_sinks(window, softcap, sinks, block_size):
    (ours, plain), q = ragged(
        [1, 1, 30, 3], [70, 3, 25, 0], heads=6, kv_heads=2, dim=32, block_size=block_size, seed=3
    )
    how = {"scale": 0.3, "window": window, "softcap": softcap, "sinks": torch.randn(6) if sinks else None}
    torch.testing.assert_close(ours.attend(1, q, **how), plain.attend(1, q, **how), atol=2e-5, rtol=2e-5)


def test_strided_queries_and_values():
    (ours, _plain), q = ragged([1, 9], [4, 8], heads=4, kv_heads=2, dim=32)
    spread = torch.randn(4, 10, 32).transpose(0, 1)
    spread.copy_(q)
    assert not spread.is_contiguous()
    torch.testing.assert_close(ours.attend(1, spread, scale=1.0), ours.attend(1, q, scale=1.0))


def test_the_reference_layout_is_what_write_stores():
    (_ours, plain), _q = ragged([3], [0], heads=2, kv_heads=1, dim=16)
    assert plain.pool[:, 0].abs().sum() == 0 and plain.pool[:, 1].abs().sum() > 0


def test_shapes_the_kernels_do_not_know_go_to_torch():
    assert PagedAttention(torch.zeros(2, 1, 2, 1, 16, 24), 1).backend == "torch"
    assert PagedAttention(torch.zeros(2, 1, 2, 1, 8, 16), 1).backend == "torch"
    assert PagedAttention(torch.zeros(2, 1, 2, 1, 16, 16, dtype=torch.float16), 1).backend == "torch"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_packed_linear(dtype):
    layer, x = torch.nn.Linear(48, 32, dtype=dtype), torch.randn(5, 48).to(dtype)
    torch.testing.assert_close(PackedLinear(layer.weight, layer.bias)(x), layer(x))
