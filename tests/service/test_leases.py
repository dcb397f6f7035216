"""What a partition tells its next owner."""

from types import SimpleNamespace

from aiokafka import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from plait.service.commit_metadata import Mark, Progress
from plait.service.leases import RESERVE, Lease, Partition


def partition() -> Partition:
    return Partition(TopicPartition("t", 0), epoch=5)


def test_the_reservation_reaches_what_waits_whatever_is_missing_before_it() -> None:
    p = partition()
    p.restore(None, None, 10)
    p.waiting.append(SimpleNamespace(offset=5_000_000))
    assert p.progress(clean=False).reach == 5_000_000 + RESERVE
    p.tracker.deliver(3)
    assert p.progress(clean=False).reach == 5_000_000 + RESERVE


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_a_reservation_is_made_before_the_last_one_is_used_up_and_not_at_every_record(
    steps: list[int],
) -> None:
    p, offset, made = partition(), 0, set()
    p.restore(0, Progress(0, 4), 0)
    for step in steps:
        p.tracker.deliver(offset)
        p.reach = p.progress(clean=False).reach
        made.add(p.reach)
        assert RESERVE // 2 <= p.reach - offset <= RESERVE + 1
        offset += step
    assert len(made) <= 1 + offset // (RESERVE // 2)


def test_a_log_that_is_not_the_one_that_was_committed_for() -> None:
    p = partition()
    p.restore(100, Progress(1100, 4, [105], {101: Mark(1, 4)}), 50)
    assert p.tracker.position is None and p.tracker.deliver(0) and p.maybe_started(49)
    assert p.progress(clean=False).marks == {}


def test_marks_stay_until_their_record_is_finished() -> None:
    p = partition()
    p.restore(10, Progress(1010, 4, [], {11: Mark(1, 3), 12: Mark(1, 4)}), 20)
    leases = []
    for offset in (10, 11):
        p.tracker.deliver(offset)
        leases.append(Lease(p, offset, 1, lambda lease: None))
    assert p.progress(clean=False).marks == {11: Mark(1, 3), 12: Mark(1, 4)}
    leases[1].at_risk = lambda: True
    assert p.progress(clean=False).marks == {11: Mark(2, 5), 12: Mark(1, 4)}
    leases[1].attempt_epoch = 8
    assert p.progress(clean=False).marks[11] == Mark(2, 8) and p.progress(clean=False).epoch == 8
    leases[1].abandon()
    assert p.progress(clean=False).marks == {11: Mark(1, 3), 12: Mark(1, 4)}
    leases[0].finish()
    p.tracker.finish(11)
    assert p.tracker.position == 12 and p.progress(clean=True).marks == {12: Mark(1, 4)}
