"""The committed offset is always the contiguous prefix of what was delivered, whatever finishes first."""

from hypothesis import given
from hypothesis import strategies as st

from plait.service.offsets import OffsetTracker

gaps = st.lists(st.integers(1, 5), min_size=1, max_size=60)


@given(start=st.integers(0, 1000), steps=gaps, data=st.data())
def test_position_is_the_contiguous_prefix(start: int, steps: list[int], data: st.DataObject) -> None:
    offsets = [start]
    for step in steps:
        offsets.append(offsets[-1] + step)
    tracker = OffsetTracker()
    waiting, delivered, finished = list(offsets), [], set()
    while waiting or len(finished) < len(offsets):
        unfinished = [o for o in delivered if o not in finished]
        if waiting and (not unfinished or data.draw(st.booleans())):
            delivered.append(waiting.pop(0))
            assert tracker.deliver(delivered[-1])
        else:
            done = data.draw(st.sampled_from(unfinished))
            finished.add(done)
            tracker.finish(done)
        prefix = []
        for offset in delivered:
            if offset not in finished:
                break
            prefix.append(offset)
        assert tracker.position == (prefix[-1] + 1 if prefix else delivered[0])
        assert tracker.finished_above() == sorted(finished - set(prefix))
        assert tracker.unfinished == len(delivered) - len(finished)
    assert tracker.position == offsets[-1] + 1


def test_a_second_delivery_is_recognised() -> None:
    tracker = OffsetTracker()
    assert tracker.deliver(7)
    assert not tracker.deliver(7)
    assert not tracker.deliver(3)
    tracker.finish(7)
    assert not tracker.deliver(7)
    assert tracker.position == 8


def test_finishing_twice_or_out_of_range_changes_nothing() -> None:
    tracker = OffsetTracker()
    tracker.finish(1)
    assert tracker.position is None
    tracker.deliver(1)
    tracker.deliver(2)
    tracker.finish(1)
    tracker.finish(1)
    assert tracker.position == 2
    assert tracker.finished_above() == []


@given(st.integers(0, 1000), gaps, st.data())
def test_a_new_owner_takes_only_what_is_not_finished(
    start: int, steps: list[int], data: st.DataObject
) -> None:
    offsets = [start]
    for step in steps:
        offsets.append(offsets[-1] + step)
    first, done = OffsetTracker(), data.draw(st.sets(st.sampled_from(offsets)))
    for offset in offsets:
        assert first.deliver(offset)
    for offset in done:
        first.finish(offset)
    second = OffsetTracker(first.position, first.finished_above())
    assert second.finished_above() == first.finished_above()
    gone = data.draw(st.sets(st.sampled_from(offsets)))  # compacted away meanwhile
    left = [offset for offset in offsets if offset not in gone]
    taken = [offset for offset in left if second.deliver(offset)]
    assert taken == [offset for offset in left if offset not in done]
    for offset in taken:
        second.finish(offset)
    assert second.finished_above() == [o for o in first.finished_above() if not left or o > left[-1]]
    assert second.position == max([first.position or start, *(o + 1 for o in left)])
