"""What was published, as a reader that follows the epochs has it: the same events, the same next index."""

from hypothesis import given
from hypothesis import strategies as st

from plait.schemas import DoneEvent, TokensEvent, Usage
from plait.schemas.events import Timing
from plait.service.event_order import EventOrder
from plait.service.history import History


def tokens(index: int, text: str, epoch: int = 1, choice: int = 0) -> TokensEvent:
    ids = [ord(c) for c in text]
    return TokensEvent(request_id="r", index=index, epoch=epoch, choice=choice, token_ids=ids, text=text)


def done(index: int, epoch: int = 1) -> DoneEvent:
    usage, timing = Usage(prompt_tokens=1, completion_tokens=1), Timing(total_ms=1)
    return DoneEvent(
        request_id="r",
        index=index,
        epoch=epoch,
        finish_reason="stop",
        finish_reasons=["stop"],
        usage=usage,
        timing=timing,
    )


def history(*events: TokensEvent | DoneEvent) -> History:
    result = History()
    for event in events:
        result.add(event)
    return result


def test_nothing() -> None:
    empty = history()
    assert not empty.finished and empty.events == [] and empty.choices(1)[0].token_ids == []


def test_choices_and_duplicates() -> None:
    found = history(tokens(0, "ab"), tokens(1, "x", choice=1), tokens(1, "x", choice=1), tokens(2, "c"))
    assert [c.text for c in found.choices(2)] == ["abc", "x"] and len(found.events) == 3
    assert not found.finished and not found.torn and found.epoch == 1
    assert found.progressed_since(1) and not found.progressed_since(2)


def test_a_newer_epoch_replaces_what_it_repeats() -> None:
    found = history(
        tokens(0, "a"), tokens(1, "b"), tokens(2, "c"), tokens(1, "bcd", 4), tokens(3, "zombie", 1)
    )
    assert found.choices(1)[0].text == "abcd" and len(found.events) == 2 and found.epoch == 4


def test_finished_only_when_the_end_can_be_reached() -> None:
    assert history(tokens(0, "a"), done(1)).finished
    torn = history(tokens(0, "a"), done(2))
    assert not torn.finished and torn.torn and len(torn.events) == 1
    mended = history(tokens(0, "a"), tokens(2, "c"), tokens(1, "b", 2), tokens(2, "c", 2), done(3, 2))
    assert mended.finished and mended.choices(1)[0].text == "abc"
    assert history(done(0), tokens(1, "x")).events == [done(0)], "nothing follows the end"


events = st.lists(
    st.builds(tokens, st.integers(0, 6), st.text("abc", min_size=1, max_size=3), st.integers(1, 4)),
    max_size=25,
)


@given(events)
def test_a_reader_waits_for_the_index_that_a_new_worker_publishes_next(log: list[TokensEvent]) -> None:
    found, order = history(*log), EventOrder()
    for event in log:
        order.add(event)
    assert len(found.events) == order.next and found.epoch == order.epoch
    assert found.torn == order.gap
