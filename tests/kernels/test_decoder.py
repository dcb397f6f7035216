"""The compiled decoder layers and packed products against plain torch."""

import ctypes
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from plait.kernels import cpu
from plait.kernels.attention import PagedAttention
from plait.kernels.batch import Batch
from plait.kernels.decoder import Decoder, LayerWeights, PanelLinear, fits, pack

EPS, DIM, HEADS, KV_HEADS, HIDDEN, INNER = 1e-5, 32, 4, 2, 48, 80
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 2, 11, 12, 13, 25, 96, 97, 200])
@pytest.mark.parametrize("outputs", [16, 32, 50])
def test_panel_linear(rows, outputs, dtype):
    x, weight = torch.randn(rows, 64).to(dtype), torch.randn(outputs, 64).to(dtype)
    torch.testing.assert_close(PanelLinear(weight)(x), x.float() @ weight.float().T, atol=1e-4, rtol=1e-5)


def rounded(weight):
    """What `pack` keeps of a matrix in int8."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scales).round() * scales


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 13, 97])
@pytest.mark.parametrize("outputs", [16, 50])
def test_panel_linear_of_8_bits(rows, outputs, dtype):
    x, weight, bias = (torch.randn(*n).to(dtype) for n in ((rows, 64), (outputs, 64), (outputs,)))
    want = x.float() @ rounded(weight).T + bias.float()
    layer = PanelLinear(weight, bias, int8=True)
    torch.testing.assert_close(layer(x), want, atol=1e-4, rtol=1e-5)
    assert layer.panels.weights.dtype == torch.int8
    assert PanelLinear(weight, int8=True, dtype=dtype)(x).dtype == dtype


def test_an_output_whose_weights_are_zero():
    assert not PanelLinear(torch.zeros(16, 32), int8=True)(torch.randn(2, 32)).any()
    assert pack(torch.zeros(3, 32), int8=True).scales.shape == (32,)


def test_widths_and_dtypes_the_products_do_not_know():
    assert fits(torch.float32, 48, 16) and fits(torch.bfloat16, 48)
    assert not fits(torch.float16, 48) and not fits(torch.float32, 40)


def weights(dtype, *, bias, window):
    def matrix(rows, columns):
        return (torch.randn(rows, columns) * columns**-0.5).to(dtype)

    kv = KV_HEADS * DIM
    return LayerWeights(
        matrix(HEADS * DIM, HIDDEN), matrix(kv, HIDDEN), matrix(kv, HIDDEN), matrix(HIDDEN, HEADS * DIM),
        matrix(INNER, HIDDEN), matrix(INNER, HIDDEN), matrix(HIDDEN, INNER),
        norm=torch.rand(HIDDEN).to(dtype) + 0.5,
        mlp_norm=torch.rand(HIDDEN).to(dtype) + 0.5,
        qkv_bias=torch.randn(HEADS * DIM + 2 * kv).to(dtype) if bias else None,
        window=window,
    )  # fmt: skip


def plainly(w, x, cos, sin):
    """One layer over one whole sequence x [T, H] in float32."""
    w = {name: getattr(w, name) for name in w.__slots__}
    w = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in w.items()}
    t = x.shape[0]

    def norm(h, weight):
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * weight

    def rotated(h):
        half = torch.cat([-h[..., DIM // 2 :], h[..., : DIM // 2]], -1)
        return h * cos[:, None] + half * sin[:, None]

    qkv = norm(x, w["norm"]) @ torch.cat([w["q"], w["k"], w["v"]]).T
    if w["qkv_bias"] is not None:
        qkv = qkv + w["qkv_bias"]
    q, k, v = (h.view(t, -1, DIM) for h in qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1))
    q, k = rotated(q), rotated(k)
    k, v = (h.repeat_interleave(HEADS // KV_HEADS, 1) for h in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    at = torch.arange(t)
    seen = at[:, None] >= at
    if w["window"]:
        seen &= at[:, None] - at < w["window"]
    attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    x = x + attended.reshape(t, -1) @ w["out"].T
    h = norm(x, w["mlp_norm"])
    return x + (functional.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"].T


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "bias,window,int8", [(False, 0, False), (True, 0, False), (False, 7, False), (True, 0, True)]
)
def test_layers_over_a_ragged_batch_equal_plain_layers_over_each_sequence(dtype, bias, window, int8):
    torch.manual_seed(0)
    layers = [weights(dtype, bias=bias, window=window) for _ in range(3)]
    decoder = Decoder(EPS, DIM**-0.5, int8)
    for layer in layers:
        decoder.add(layer)
    decoder.seal()
    if int8:
        matrices = ("q", "k", "v", "out", "gate", "up", "down")
        layers = [replace(w, **{name: rounded(getattr(w, name)) for name in matrices}) for w in layers]
    lengths, first = [1, 40, 17], [0, 23, 16]
    attention = PagedAttention(torch.empty(12, 3, 2, KV_HEADS, 16, DIM, dtype=dtype), HEADS)
    tables = torch.tensor([[5, 0, 0], [2, 9, 0], [7, 1, 0]], dtype=torch.int32)
    tables[1, 2] = 11
    angle = torch.rand(40, DIM // 2).repeat(1, 2) * 6
    streams = [torch.randn(n, HIDDEN).to(dtype) for n in lengths]

    def iteration(starts, stops):
        """The tokens from starts to stops of each sequence, through all layers."""
        spans = [(i, a, b) for i, (a, b) in enumerate(zip(starts, stops, strict=True)) if b > a]
        at = [(i, p) for i, a, b in spans for p in range(a, b)]
        counts = torch.tensor([b - a for _, a, b in spans])
        attention.begin(
            Batch(
                query_start=torch.cat([torch.zeros(1), counts.cumsum(0)]).int(),
                seq_lens=torch.tensor([b for _, _, b in spans], dtype=torch.int32),
                block_tables=tables[[i for i, _, _ in spans]].contiguous(),
                slots=torch.tensor([int(tables[i, p // 16]) * 16 + p % 16 for i, p in at]),
                pool=attention.pool,
                max_query=int(counts.max()),
                max_seq=max(stops),
                num_decodes=0,
            )
        )
        rows = torch.stack([streams[i][p] for i, p in at])[None]
        where = torch.tensor([p for _, p in at])
        tables_of = (angle[where].cos()[None].contiguous(), angle[where].sin()[None].contiguous())
        return decoder(rows, position_embeddings=tables_of, plait=attention)[0]

    assert not decoder.seconds.any()
    before = iteration([0, 0, 0], first)
    assert (decoder.seconds > 0).all()
    after = iteration(first, lengths)
    wanted = []
    for x in streams:
        h = x.float()
        for layer in layers:
            h = plainly(layer, h, angle[: len(x)].cos(), angle[: len(x)].sin())
        wanted.append(h)
    tolerance = TOLERANCE[dtype]
    for got, spans in ((before, zip([0] * 3, first, strict=True)), (after, zip(first, lengths, strict=True))):
        want = torch.cat([wanted[i][a:b] for i, (a, b) in enumerate(spans)])
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


def test_many_calls_by_many_threads_agree():
    """The team's barriers and claims hold over thousands of steps."""
    x, weight = torch.randn(40, 64), torch.randn(320, 64)
    layer, want = PanelLinear(weight), x @ weight.T
    for threads in (1, 2, 4):
        out = torch.empty(40, 320)
        for _ in range(500):
            cpu.library().plait_linear(
                x.data_ptr(), ctypes.byref(layer.panels.pointers), out.data_ptr(), 40, 64, 320, threads, False
            )
        torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-5)
