"""The attention kernel in Triton's interpreter against the reference."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Layout, build
from triton_process import interpreted

from plait.kernels import reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DECODES = ((1, 1), (1, 70), (1, 64), (1, 133))
PREFILLS = ((5, 5), (40, 40), (23, 90), (2, 16))
MIXED = ((1, 1), (1, 97), (33, 33), (9, 70), (2, 2))


def difference(layout: Layout, pieces: int | None = None, capability: tuple[int, int] = (8, 0)) -> float:
    """The largest between kernel and reference, relative to 1 + |expected|; a NaN stays one."""
    from plait.kernels import triton_attention, triton_config

    device = triton_config.Device(capability, 1)
    case = build(layout)
    cut = triton_config.Cut(pieces, 1) if pieces else triton_config.cut_for(device, layout.kv_heads, 64)
    with (
        patch.object(triton_attention, "device_of", return_value=device),
        patch.object(triton_attention, "cut_for", return_value=cut),
    ):
        found = case.run(triton_attention.paged_attention)
    assert found.dtype == layout.dtype
    expected = case.run(reference.paged_attention).float()
    return float(((found.float() - expected).abs() / (1 + expected.abs())).max())


def agree(layout: Layout, **kwargs) -> None:
    assert interpreted(difference, layout, **kwargs) <= TOLERANCE[layout.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (8, 2), (8, 1)])
def test_grouped_heads(heads, kv_heads, dtype):
    agree(Layout(MIXED, heads, kv_heads, 64, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_head_sizes(head_dim, dtype):
    agree(Layout(((1, 35), (7, 20)), 4, 2, head_dim, dtype=dtype))


@pytest.mark.parametrize("chunks", [DECODES, PREFILLS, MIXED], ids=["decodes", "prefills", "mixed"])
@pytest.mark.parametrize("window", [1, 5, 32, 1000])
def test_sliding_window(window, chunks):
    agree(Layout(chunks, 6, 2, 64, window=window))


@pytest.mark.parametrize("chunks", [DECODES, PREFILLS], ids=["decodes", "prefills"])
@pytest.mark.parametrize(
    "options",
    [{"softcap": 0.7}, {"sinks": True}, {"softcap": 50.0, "sinks": True, "window": 30}],
    ids=lambda options: "+".join(options),
)
def test_softcap_and_sinks(options, chunks):
    agree(Layout(chunks, 6, 2, 64, **options))


@pytest.mark.parametrize("pieces", [3, 40])
@pytest.mark.parametrize("options", [{}, {"window": 40, "sinks": True}, {"sinks": True, "softcap": 2.0}])
def test_pieces_of_long_decodes(options, pieces):
    agree(Layout((*DECODES, (6, 30)), 6, 2, 80, **options), pieces=pieces)


def test_more_pieces_than_are_joined_at_once():
    agree(Layout(((1, 1), (1, 700)), 2, 1, 16), pieces=60)


def test_a_decode_is_cut_by_itself_when_the_device_is_idle():
    agree(Layout(((1, 1100),), 2, 1, 16, dtype=torch.bfloat16), capability=(9, 0))


@pytest.mark.parametrize("block_size", [16, 32])
def test_block_sizes(block_size):
    agree(Layout(MIXED, 4, 2, 64, block_size=block_size, window=50))


def test_tiles_of_hopper():
    agree(Layout(((1, 80), (70, 150)), 4, 2, 128, dtype=torch.bfloat16, window=64), capability=(9, 0))


def test_more_heads_than_rows_in_a_tile():
    agree(Layout(((1, 20), (3, 9)), 40, 1, 16))


def empty_sequences() -> torch.Tensor:
    from plait.kernels import triton_attention

    case = build(Layout(((1, 20), (1, 5), (4, 8)), sinks=True))
    case.batch.seq_lens[1] = 0
    return case.run(triton_attention.paged_attention)


def test_a_decode_of_length_zero_gives_zeros():
    out = interpreted(empty_sequences)
    assert out[1].eq(0).all()
    assert out.isfinite().all()


def test_other_types_are_refused():
    from plait.kernels import triton_attention

    case = build(Layout(((1, 4),)))
    case.q = case.q.half()
    with pytest.raises(ValueError, match="float16"):
        case.run(triton_attention.paged_attention)


def planned(lengths: list[int], window: int, wanted: int, least: int) -> tuple[list[int], list[int], int]:
    from plait.kernels.triton_attention import plan_kernel

    seqs = len(lengths)
    items, firsts = torch.full((seqs + wanted + 5,), -1), torch.full((seqs + 1,), -1)
    items, firsts, share = items.int(), firsts.int(), torch.zeros(1, dtype=torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    # Fewer lanes than a device gets, so that a few sequences go over them.
    plan_kernel[(1,)](items, firsts, share, lens, seqs, wanted, least, WINDOW=window, TILE_N=16, LANES=4)
    return items.tolist(), firsts.tolist(), share.item()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 900), min_size=1, max_size=11),
    st.sampled_from([0, 100]),
    st.integers(1, 20),
    st.integers(1, 5),
)
def test_a_plan_gives_every_tile_to_one_item(lengths, window, wanted, least):
    items, firsts, share = interpreted(planned, lengths, window, wanted, least)
    tiles = [-(-(min(n, window) if window else n) // 16) for n in lengths]
    assert share == max(-(-sum(tiles) // wanted), least)
    counts = [max(1, -(-n // share)) for n in tiles]
    expected = [seq for seq, count in enumerate(counts) for _ in range(count)]
    assert firsts == [sum(counts[:i]) for i in range(len(lengths) + 1)]
    assert items[: len(expected)] == expected
    assert len(expected) <= len(lengths) + wanted, "the grid would leave some out"
    assert set(items[len(expected) :]) == {-1}


def test_pieces_fill_the_device_and_no_more():
    from plait.kernels.triton_config import Cut, Device, cut_for

    assert cut_for(Device((9, 0), 132), 8, 64) == Cut(33, 4)
    assert cut_for(Device((8, 6), 20), 64, 32) == Cut(1, 8)


@st.composite
def layouts(draw) -> Layout:
    decodes = draw(st.lists(st.integers(1, 60), max_size=3))
    chunks = draw(st.lists(st.tuples(st.integers(2, 20), st.integers(0, 50)), max_size=3))
    kv_heads = draw(st.integers(1, 2))
    return Layout(
        (*((1, length) for length in decodes), *((new, new + old) for new, old in chunks)) or ((1, 1),),
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 24, 32])),
        block_size=draw(st.sampled_from([16, 32])),
        window=draw(st.none() | st.integers(1, 80)),
        softcap=draw(st.none() | st.floats(0.5, 60)),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=20, deadline=None)
@given(layouts(), st.sampled_from([1, 2, 9]))
def test_random_layouts(layout, pieces):
    agree(layout, pieces=pieces)
