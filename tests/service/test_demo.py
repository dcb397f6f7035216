import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from plait.schemas import Timing, Usage
from plait.service import demo


def finished(row, reason="stop"):
    row.finish = reason
    row.timing = Timing(queue_ms=10.4, ttft_ms=20, tpot_ms=5, total_ms=1010.4)
    row.usage = Usage(prompt_tokens=3, completion_tokens=50)
    return row


def plain():
    out = io.StringIO()
    return demo.PlainDisplay(Console(file=out)), out


def test_there_are_at_least_eight_requests_of_different_priorities_with_names_of_their_own():
    rows = demo.rows(20)
    assert len({row.name for row in rows}) == 20
    assert len({row.priority for row in rows[:8]}) == 8 and {0, 9} <= {row.priority for row in rows}


def test_plain_lines_name_the_request_and_come_before_its_end():
    shown, out = plain()
    row = demo.Row("a", 9, "")
    for word in ["The quick brown fox ", "jumps over the lazy dog. "] * 3:
        shown.update(row, word)
    first = out.getvalue()
    assert first.startswith("[a p9] The quick brown fox jumps over the lazy dog. The quick")
    shown.update(finished(row), "")
    assert out.getvalue().endswith("lazy dog.\n[a p9] <stop>\n")


@given(st.lists(st.text(alphabet="ab \n", max_size=100), max_size=20))
def test_plain_lines_lose_no_word(pieces):
    shown, out = plain()
    row = demo.Row("a", 1, "")
    for piece in pieces:
        shown.update(row, piece)
    shown.update(finished(row), "")
    lines = out.getvalue().splitlines()
    assert all(line.startswith("[a p1] ") and len(line) <= 7 + 72 for line in lines)
    text = "".join(line.removeprefix("[a p1] ") for line in lines[:-1])
    assert text.replace(" ", "") == "".join("".join(pieces).split())


def test_the_summary_has_one_line_per_request():
    rows = [finished(demo.Row("first", 9, "")), demo.Row("second", 0, "", finish="overloaded", error="full")]
    out = io.StringIO()
    Console(file=out, width=120).print(demo.summary(rows))
    lines = out.getvalue().splitlines()
    assert lines[1].split() == ["first", "9", "10", "20", "50", "50.0", "stop"]
    assert lines[2].split() == ["second", "0", "-", "-", "0", "-", "overloaded"]
    assert lines[3] == "second: full"


def test_the_live_display_fits_the_terminal_and_shows_the_newest_text():
    rows = demo.rows(8)
    rows[0].text = "\n".join(f"line {n}" for n in range(100))
    finished(rows[1])
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=30, legacy_windows=False)
    with demo.display(console, rows) as shown:
        rows[2].text += "[bold]not markup[/bold]"
        shown.update(rows[2], "")
    text = out.getvalue()
    assert "line 99" in text and "priority 9" in text and "[bold]not markup" in text
