"""Streamed text: whole characters, together the text of all ids, and nothing of a stop string."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from plait.engine.api import SamplingParams
from plait.engine.models import resolve
from plait.engine.text import HALF, LONGEST, TextStream, overlap
from plait.engine.tokenizer import Tokenizer
from tiny_models import byte_tokenizer, fallback_tokenizer


def wrap(backend: Backend) -> Any:
    added = backend.get_added_tokens_decoder()
    return SimpleNamespace(
        backend=backend, special_ids=frozenset(i for i, token in added.items() if token.special)
    )


BYTES, FALLBACK = wrap(byte_tokenizer()), wrap(fallback_tokenizer())
EOS, PAD = 256, 257


@cache
def bundled() -> Tokenizer:
    return Tokenizer(resolve("smollm2"))


def pieces(
    tokenizer: Any, ids: list[int], sampling: SamplingParams | None = None, prompt: Any = ()
) -> list[str]:
    """What each token gave, up to a stop string, and the flush at the end."""
    stream = TextStream(tokenizer, sampling or SamplingParams(), list(prompt))
    out = []
    for token in ids:
        out.append(stream.push(token))
        if stream.stopped:
            break
    return [*out, stream.finish()]


def ids_of(text: str) -> list[int]:
    return BYTES.backend.encode(text).ids


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 257), max_size=30), skip=st.booleans(), prompt=st.text(max_size=9))
def test_pieces_make_the_whole_text_for_any_ids(ids: list[int], skip: bool, prompt: str) -> None:
    """The text of all ids, but for U+FFFD at the very end, where a character is not complete."""
    got = "".join(pieces(BYTES, ids, SamplingParams(skip_special_tokens=skip), ids_of(prompt)))
    assert got == BYTES.backend.decode(ids, skip_special_tokens=skip).rstrip(HALF)


@pytest.mark.model
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_make_the_whole_text_with_the_bundled_tokenizer(data: st.DataObject, skip: bool) -> None:
    size = bundled().vocab_size - 1
    ids = data.draw(st.lists(st.integers(0, size), max_size=30))
    prompt = data.draw(st.sampled_from([[], bundled().encode("Hello"), [1, 2, 3]]))
    got = "".join(pieces(bundled(), ids, SamplingParams(skip_special_tokens=skip), prompt))
    assert got == bundled().decode(ids, skip_special_tokens=skip).rstrip(HALF)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("aé€漢🎉👩‍👧 \n"), max_size=12), prompt=st.sampled_from(["", "a", "漢 "]))
def test_a_character_comes_with_its_last_byte(text: str, prompt: str) -> None:
    """sglang#31598: here every byte is a token."""
    ids, done = ids_of(text), 0
    for token, piece in zip(ids, pieces(BYTES, ids, prompt=ids_of(prompt)), strict=False):
        assert HALF not in piece and len(piece) <= 1
        done += len(piece)
        assert piece == text[done - len(piece) : done], token
    assert done == len(text)


@pytest.mark.model
@pytest.mark.parametrize("text", ["🎉🎊 party 👩‍👩‍👧‍👦", "漢字かな交じり文", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢"])
def test_emoji_and_han_of_the_bundled_tokenizer(text: str) -> None:
    ids = bundled().encode(text)
    got = pieces(bundled(), ids, prompt=bundled().encode("Say:"))
    assert "".join(got) == text and not any(HALF in piece for piece in got)
    assert len(ids) > len([piece for piece in got if piece]), "no character was split; the test shows nothing"


def test_a_character_begun_in_the_prompt_is_completed_and_the_prompt_not_repeated() -> None:
    euro = ids_of("€")
    assert pieces(BYTES, euro[1:], prompt=ids_of("total ") + euro[:1]) == ["", "€", ""]
    assert pieces(BYTES, ids_of("x"), prompt=ids_of("total ") + euro[:1]) == ["x", ""]


def test_bytes_that_are_no_text_do_not_hide_what_follows() -> None:
    bad = ids_of("€")[1]
    assert "".join(pieces(BYTES, [bad, *ids_of("ab"), bad, bad, *ids_of("c")])) == f"{HALF}ab{HALF * 2}c"
    ids = [bad] * 500 + ids_of("then")
    stream = TextStream(BYTES, SamplingParams(), [])
    out = ""
    for token in ids:
        out += stream.push(token)
        assert len(stream.pieces.ids) <= LONGEST
    assert out.endswith("then")
    assert "".join(pieces(BYTES, ids_of("ab€")[:-1])) == "ab"


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [EOS, *ids_of("a"), PAD, *ids_of("é")[:1], EOS, *ids_of("é")[1:], EOS]
    assert "".join(pieces(BYTES, ids)) == "aé"
    shown = "".join(pieces(BYTES, [EOS, *ids_of("a")], SamplingParams(skip_special_tokens=False)))
    assert shown == "<eos>a"
    assert len(TextStream(BYTES, SamplingParams(), [EOS] * 9).pieces.ids) == 0


def test_many_special_tokens_cost_nothing() -> None:
    stream = TextStream(BYTES, SamplingParams(), [])
    for _ in range(1000):
        assert stream.push(EOS) == ""
    assert not stream.pieces.ids


def test_leading_spaces_of_a_sentencepiece_vocabulary() -> None:
    vocab = FALLBACK.backend.get_vocab()
    hello, world, bang = vocab["▁Hello"], vocab["▁world"], vocab["!"]
    assert pieces(FALLBACK, [world, bang, world], prompt=[1, hello]) == [" world", "!", " world", ""]
    assert pieces(FALLBACK, [hello, world], prompt=[1]) == ["Hello", " world", ""]


def test_byte_fallback_gives_whole_characters() -> None:
    vocab = FALLBACK.backend.get_vocab()
    euro = [vocab[f"<0x{b:02X}>"] for b in "€".encode()]
    got = pieces(FALLBACK, [*euro, *euro, vocab["a"]], prompt=[1, vocab["▁Hello"]])
    assert got == ["", "", "€", "", "", "€", "a", ""]
    broken = "".join(pieces(FALLBACK, [*euro, euro[0], vocab["a"]], prompt=[1, vocab["b"]]))
    assert broken.startswith("€") and broken.endswith("a")


def plain_stop(text: str, stops: tuple[str, ...], include: bool) -> str:
    """Character by character, as a reader would stop."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[:end] if include else text[: end - max(map(len, done))]
    return text


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(st.sampled_from("abc"), max_size=14),
    stops=st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
    cuts=st.lists(st.integers(0, 14), max_size=6),
)
def test_stop_strings_do_not_depend_on_how_text_is_cut(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    """vllm#3574: nothing of a stop string leaks, and what only looked like one is not lost (llama.cpp#9867)."""
    expected = plain_stop(text, tuple(stops), include)
    sampling = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    assert "".join(pieces(BYTES, ids_of(text), sampling)) == expected

    stream = TextStream(BYTES, sampling, [])
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    out = ""
    for start, end in pairwise(edges):
        stream.held += text[start:end]
        out += stream._release()
        if stream.stopped:
            break
    assert out + stream.finish() == expected


def test_text_is_held_only_while_it_may_become_a_stop_string() -> None:
    sampling = SamplingParams(stop=("END.", "\n\n"))
    assert pieces(BYTES, ids_of("xENx\nEND"), sampling) == ["x", "", "", "ENx", "", "\n", "", "", "END"]
    assert pieces(BYTES, ids_of("ab\n\ncd"), sampling) == ["a", "b", "", "", ""]


def test_min_tokens_come_before_a_stop_string() -> None:
    """vllm#21987, vllm#46243"""
    sampling = SamplingParams(stop=("b",), min_tokens=4)
    assert pieces(BYTES, ids_of("abababab"), sampling) == ["a", "b", "a", "", ""]
    sampling = SamplingParams(stop=("b",), min_tokens=5)
    assert pieces(BYTES, ids_of("abababab"), sampling) == ["a", "b", "a", "b", "a", "", ""]


@pytest.mark.parametrize(
    "text,stop,size", [("", "ab", 0), ("xa", "ab", 1), ("aab", "aabb", 3), ("ab", "ab", 0), ("aa", "ab", 1)]
)
def test_overlap_is_the_longest_end_that_begins_the_stop(text: str, stop: str, size: int) -> None:
    assert overlap(text, stop) == size


@pytest.mark.model
def test_the_bundled_chat_template_and_its_refusals() -> None:
    ids = bundled().encode_chat([{"role": "user", "content": "Hi"}])
    text = bundled().decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert bundled().decode(ids).endswith("user\nHi\nassistant\n")
    assert max(ids) < bundled().vocab_size == 49152


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    BYTES.backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == 258 and tokenizer.special_ids == {EOS, PAD}
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match="no system role"):
        Tokenizer(tmp_path).encode_chat([{"role": "system", "content": "Hi"}])
