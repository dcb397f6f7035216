from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.schemas import TokensEvent
from plait.service.event_order import EventOrder


def event(index, text, epoch=1, choice=0):
    return TokensEvent(
        request_id="r", index=index, epoch=epoch, choice=choice, token_ids=[ord(c) for c in text], text=text
    )


def read(events):
    order = EventOrder()
    return order, [ready for each in events for ready in order.add(each)]


def test_a_new_worker_that_did_not_see_the_last_event_goes_on_without_doubling_its_text():
    _, ready = read(
        [event(0, "ab"), event(1, "c"), event(2, "de"), event(1, "cdef", epoch=2), event(2, "g", epoch=2)]
    )
    assert "".join(e.text for e in ready) == "abcdefg"
    assert [e.index for e in ready] == [0, 1, 2, 3, 4]
    assert [i for e in ready for i in e.token_ids] == [ord(c) for c in "abcdefg"]


def test_a_repeated_event_of_a_new_epoch_is_left_out():
    _, ready = read([event(0, "a"), event(1, "b"), event(1, "b", epoch=2), event(2, "c", epoch=2)])
    assert [e.text for e in ready] == ["a", "b", "c"]


def test_choices_are_cut_each_for_itself():
    _, ready = read(
        [
            event(0, "a"),
            event(1, "x", choice=1),
            event(2, "b"),
            event(1, "xyz", 2, choice=1),
            event(2, "bc", 2),
        ]
    )
    assert [(e.choice, e.text) for e in ready] == [(0, "a"), (1, "x"), (0, "b"), (1, "yz"), (0, "c")]


@st.composite
def deliveries(draw):
    """A text published by several workers in turn: each begins where some suffix of the events was unseen."""
    text = draw(st.text("abcdefgh", min_size=1, max_size=20))
    log, starts, epoch = [], [0], 0
    while True:
        epoch += 1
        first = draw(st.integers(0, len(starts) - 1))
        del starts[first + 1 :]
        until = draw(st.integers(1, 6))
        while starts[-1] < len(text) and until:
            at, until = starts[-1], until - 1
            size = draw(st.integers(1, 4))
            made = event(len(starts) - 1, text[at : at + size], epoch)
            log += [made] * draw(st.integers(1, 2))
            starts.append(min(len(text), at + size))
        if starts[-1] == len(text):
            return text, log


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(deliveries(), st.sets(st.integers(0, 40)))
def test_no_gap_and_no_duplicate_whoever_published(delivery, again):
    text, log = delivery
    late = [e for i, e in enumerate(log) if i in again]
    order, ready = read([*log, *late])
    assert "".join(e.text for e in ready) == text
    assert [e.index for e in ready] == list(range(len(ready)))
    assert not order.gap
