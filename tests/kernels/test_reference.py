"""The reference against torch's own attention and against a token-by-token formula."""

import math

import pytest
import torch
from ragged import Case, Layout, build
from torch.nn.functional import scaled_dot_product_attention

from plait.kernels import reference

MIXED = ((1, 1), (1, 37), (1, 64), (7, 7), (20, 53), (16, 16), (2, 40))


def by_formula(case: Case) -> torch.Tensor:
    """Every output element by its definition, in Python floats."""
    scale, window, softcap, sinks = (case.options[key] for key in ("scale", "window", "softcap", "sinks"))
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    starts = case.batch.query_start.tolist()
    for seq, length in enumerate(case.batch.seq_lens.tolist()):
        for row in range(starts[seq], starts[seq + 1]):
            position = length - starts[seq + 1] + row
            for head in range(case.q.shape[1]):
                shared = head // (case.q.shape[1] // case.keys[seq].shape[1])
                query = case.q[row, head].double()
                weights = {}
                for key in range(position + 1):
                    if window is None or position - key < window:
                        score = float(query @ case.keys[seq][key, shared].double()) * scale
                        weights[key] = math.exp(softcap * math.tanh(score / softcap) if softcap else score)
                total = sum(weights.values()) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
                for key, weight in weights.items():
                    out[row, head] += weight / total * case.values[seq][key, shared].double()
    return out


@pytest.mark.parametrize("window", [None, 1, 19])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_equals_the_formula(window, softcap, sinks):
    chunks = ((1, 1), (1, 21), (3, 3), (6, 40))
    case = build(
        Layout(chunks, heads=4, kv_heads=2, head_dim=16, window=window, softcap=softcap, sinks=sinks)
    )
    torch.testing.assert_close(
        case.run(reference.paged_attention).double(), by_formula(case), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 80), (8, 1, 128)])
def test_equals_sdpa(heads, kv_heads, head_dim, dtype):
    case = build(Layout(MIXED, heads, kv_heads, head_dim, dtype=dtype))
    found = case.run(reference.paged_attention)
    assert found.dtype == dtype
    acc = torch.promote_types(dtype, torch.float32)
    starts = case.batch.query_start.tolist()
    for seq, (chunk, length) in enumerate(MIXED):
        seen = torch.ones(chunk, length, dtype=torch.bool).tril(length - chunk)
        rows = slice(starts[seq], starts[seq + 1])
        q, k, v = (x.transpose(0, 1).to(acc) for x in (case.q[rows], case.keys[seq], case.values[seq]))
        expected = scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(0, 1).to(dtype)
        torch.testing.assert_close(found[rows], expected)


def test_rows_past_the_last_sequence_are_zero():
    case = build(Layout(((1, 5), (4, 9))))
    case.q = torch.cat([case.q, case.q])
    out = case.run(reference.paged_attention)
    assert out[5:].eq(0).all()
    assert out[:5].ne(0).all()


def test_write_puts_each_token_into_its_slot_and_nowhere_else():
    pool = torch.zeros(4, 2, 2, 3, 16, 8)
    k, v = torch.randn(2, 4, 3, 8)
    reference.write_kv(pool, 1, k, v, torch.tensor([17, -1, 63, 0]))
    expected = torch.zeros_like(pool)
    for token, block, offset in ((0, 1, 1), (2, 3, 15), (3, 0, 0)):
        expected[block, 1, 0, :, offset] = k[token]
        expected[block, 1, 1, :, offset] = v[token]
    assert pool.equal(expected)


def test_copy_moves_whole_blocks():
    src, dst = torch.randn(5, 2, 2, 1, 16, 8), torch.zeros(4, 2, 2, 1, 16, 8)
    reference.copy_blocks(src, dst, torch.tensor([[4, 0], [1, 3]]))
    assert dst[0].equal(src[4])
    assert dst[3].equal(src[1])
    assert dst[1:3].eq(0).all()
