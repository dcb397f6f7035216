"""What is committed beside an offset: comes back as it was, fits, and is never taken for something else."""

import base64
import random
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.service.commit_metadata import LIMIT, Mark, Progress, decode, encode, runs

marks = st.dictionaries(
    st.integers(0, 5000), st.builds(Mark, attempts=st.integers(0, 9), epoch=st.integers(1, 50)), max_size=30
)


@st.composite
def states(draw: st.DrawFn) -> tuple[int, Progress]:
    position = draw(st.integers(0, 2**40))
    finished = sorted(draw(st.sets(st.integers(1, 8000), max_size=80)))
    return position, Progress(
        reach=position + draw(st.integers(0, 20_000)),
        epoch=draw(st.integers(50, 2**31)),
        finished=[position + at for at in finished],
        marks={position + at: mark for at, mark in draw(marks).items()},
    )


@given(states())
def test_what_fits_comes_back_as_it_was(state: tuple[int, Progress]) -> None:
    position, progress = state
    text = encode(position, progress, limit=1 << 20)
    assert decode(position, text) == progress and text.isascii()


@given(states(), st.integers(60, 400))
def test_what_does_not_fit_is_cut_from_above(state: tuple[int, Progress], limit: int) -> None:
    position, progress = state
    text = encode(position, progress, limit)
    assert len(text) <= limit
    found = decode(position, text)
    assert found is not None and (found.reach, found.epoch) == (progress.reach, progress.epoch)
    assert found.finished == list(progress.finished)[: len(found.finished)], (
        "the lowest are kept, none is invented"
    )
    kept = dict(sorted(progress.marks.items())[: len(found.marks)])
    assert found.marks == kept
    if found.marks != progress.marks:
        assert not found.finished


@pytest.mark.parametrize("pattern", ["every second", "random", "all but the first"])
def test_the_largest_window_fits_or_is_cut(pattern: str) -> None:
    draw = random.Random(7)
    takes = {
        "every second": lambda i: i % 2 == 1,
        "random": lambda i: draw.random() < 0.5,
        "all but the first": lambda i: True,
    }[pattern]
    finished = [10_000 + i for i in range(1, 10_001) if takes(i)]
    text = encode(10_000, Progress(21_000, 3, finished))
    found = decode(10_000, text)
    assert len(text) <= LIMIT and found is not None
    assert found.finished == finished[: len(found.finished)] and len(found.finished) > 2_000


@given(st.text() | st.binary().map(lambda b: "p1." + base64.urlsafe_b64encode(b).decode()))
def test_what_others_wrote_is_not_understood(text: str) -> None:
    assert decode(5, text) is None


@given(states(), st.data())
def test_a_damaged_text_is_not_misunderstood(state: tuple[int, Progress], data: st.DataObject) -> None:
    position, progress = state
    text = encode(position, progress)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("ABCabc019-_. ").filter(lambda c: c != text[at]))
    for damaged in (text[:at] + other + text[at + 1 :], text[:at], text + "AAAA"):
        found = decode(position, damaged)
        assert found is None or found == progress, "some bits of base64 and of deflate say nothing"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80",
        b"\xff" * 10,
        b"\x01\x02",
        b"\x01\x02\x01\x05",
        b"\x01\x02\x00\x03",
        b"\x01\x02\x00\x03\x00",
    ],
)
def test_a_payload_that_means_nothing(payload: bytes) -> None:
    assert decode(0, "p1." + base64.urlsafe_b64encode(zlib.compress(payload)).decode().rstrip("=")) is None


def test_a_payload_that_unpacks_to_too_much() -> None:
    huge = zlib.compress(b"\x01" * (1 << 22))
    assert decode(0, "p1." + base64.urlsafe_b64encode(huge).decode().rstrip("=")) is None
    long = zlib.compress(b"\x01\x01\x00\x01\xff\xff\xff\x7f")
    assert decode(0, "p1." + base64.urlsafe_b64encode(long).decode().rstrip("=")) is None


@given(st.sets(st.integers(0, 60)))
def test_runs(offsets: set[int]) -> None:
    found = list(runs(sorted(offsets)))
    assert [o for start, length in found for o in range(start, start + length)] == sorted(offsets)
    assert all(a + n < b for (a, n), (b, _) in pairwise(found))
