import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.service.chunking import split


def words(text: str) -> int:
    return len(text.split())


def ragged(text: str) -> int:
    """Like a merging tokenizer: "ab" is one token, so a prefix can cost more than the whole."""
    return len(text.replace("ab", "x").encode())


texts = st.text(alphabet=st.sampled_from("ab é。.!? \n\t\r😀\"'"), max_size=300) | st.text(max_size=200)


@given(texts, st.integers(4, 60), st.sampled_from([len, ragged, lambda t: len(t.encode())]))
def test_the_chunks_are_the_text_and_none_is_over_the_limit(text, limit, count):
    chunks = split(text, limit, count)
    assert "".join(chunks) == text
    assert all(chunk and count(chunk) <= limit for chunk in chunks)


@given(texts, st.integers(1, 20))
def test_word_counts_are_kept_too(text, limit):
    chunks = split(text, limit, words)
    assert "".join(chunks) == text
    assert all(words(chunk) <= limit for chunk in chunks)


def test_a_short_text_is_one_chunk():
    assert split("one two", 100, words) == ["one two"]
    assert split("", 100, words) == []


def test_paragraph_ends_come_first():
    text = "a a. a a.\n\nb b. b b.\n\nc c. c c."
    assert split(text, 9, words) == ["a a. a a.\n\nb b. b b.\n\n", "c c. c c."]


def test_a_long_paragraph_is_cut_at_a_sentence_end():
    text = 'One two three. Four five "six." Seven eight nine ten.'
    assert split(text, 7, words) == ['One two three. Four five "six." ', "Seven eight nine ten."]


def test_a_heading_is_not_left_alone():
    text = "Title\n\n" + "One two three. " * 6
    assert split(text, 10, words)[0] == "Title\n\n" + "One two three. " * 3


def test_a_long_sentence_is_cut_between_words_and_a_long_word_anywhere():
    assert split("aaaa bbbb cccc", 10, len) == ["aaaa bbbb ", "cccc"]
    assert split("a" * 25, 10, len) == ["a" * 10, "a" * 10, "a" * 5]


def test_windows_line_ends_are_paragraph_ends():
    assert split("a b\r\n\r\nc d", 3, words) == ["a b\r\n\r\n", "c d"]


def test_a_limit_that_holds_no_character_is_refused():
    with pytest.raises(ValueError, match="too small to hold the character '😀'"):
        split("😀", 3, lambda t: len(t.encode()))
    with pytest.raises(ValueError, match="at least one token"):
        split("a", 0, len)


def test_counting_stays_close_to_the_length_of_the_text():
    counted = 0

    def count(text: str) -> int:
        nonlocal counted
        counted += len(text)
        return len(text) // 4 + 1

    text = "word " * 40_000
    assert "".join(split(text, 500, count)) == text
    assert counted < 40 * len(text)
