"""Backpressure, rebalances and commits, against a consumer under the test's control."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka.errors import (
    CommitFailedError,
    KafkaConnectionError,
    OffsetOutOfRangeError,
    RequestTimedOutError,
)
from aiokafka.structs import ConsumerRecord

from fake_consumer import P0, P1, POISON, Harness
from plait.service import intake as intake_module
from plait.service.commit_metadata import Mark
from plait.service.kafka import Unreadable
from plait.service.leases import RESERVE
from service_bench import until


@pytest.fixture
async def harness() -> AsyncIterator[Any]:
    made: list[Harness] = []

    def make(**limits: Any) -> Harness:
        made.append(Harness(**limits))
        return made[-1]

    yield make
    for one in made:
        await one.intake.close()
        await asyncio.wait([one.task], timeout=5)
        assert one.task.done() and one.task.exception() is None


async def test_commits_the_contiguous_prefix_and_what_is_finished_above_it(harness: Any) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 4)
    await until(lambda: len(h.taken) == 4)
    h.finish(2, 1)
    await until(lambda: h.consumer.last_state(P0)[1].finished == [1, 2])
    assert h.consumer.last_commit(P0) == 0
    h.finish(0)
    await until(lambda: h.consumer.last_commit(P0) == 3)
    assert h.consumer.last_state(P0)[1].finished == []
    h.finish(3)
    await h.intake.close()
    assert h.consumer.last_commit(P0) == 4 and h.consumer.stopped


async def test_a_new_owner_does_not_run_what_is_finished(harness: Any) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 6)
    await until(lambda: len(h.taken) == 6)
    h.finish(0, 2, 4, 5)
    await h.consumer.rebalance({P0}, member="m2")
    await until(lambda: len(h.taken) == 8)
    assert [record.offset for record, _ in h.taken[6:]] == [1, 3]
    h.finish(7, 6)
    await until(lambda: h.consumer.last_commit(P0) == 6)


async def test_a_takeover_that_fails_is_tried_again(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "RETRY_BACKOFF_S", 0.001)
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 2)
    await until(lambda: len(h.taken) == 2)
    h.finish(1)
    await until(lambda: h.consumer.last_state(P0)[1].finished == [1])
    h.consumer.committed_errors = [KafkaConnectionError(), AttributeError("not connected")]
    await h.consumer.rebalance({P0}, member="m2")
    await until(lambda: len(h.taken) == 3)
    assert h.taken[2][0].offset == 0 and not h.consumer.committed_errors


async def test_what_was_committed_by_somebody_else_is_no_reason_to_stop(harness: Any, caplog: Any) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 3)
    await until(lambda: len(h.taken) == 3)
    h.consumer.commits.append({P0: (1, "a note of an operator")})
    await h.consumer.rebalance({P0}, member="m2")
    await until(lambda: len(h.taken) == 5)
    assert [record.offset for record, _ in h.taken[3:]] == [1, 2]
    assert all(lease.maybe_started for _, lease in h.taken[3:]) and "plait understands" in caplog.text


async def test_only_what_existed_at_the_takeover_may_have_been_started(harness: Any) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 2)
    await until(lambda: len(h.taken) == 2)
    assert not any(lease.maybe_started for _, lease in h.taken)
    h.consumer.produce(P0, 1)
    await h.consumer.rebalance({P0}, member="m2")
    await until(lambda: len(h.taken) == 5)
    assert all(lease.maybe_started for _, lease in h.taken[2:]), "the first owner may have got to the third"
    h.consumer.produce(P0, 1)
    await until(lambda: len(h.taken) == 6)
    assert not h.taken[5][1].maybe_started


async def test_a_backlog_that_nobody_reached_was_not_started(harness: Any) -> None:
    h = harness(max_in_flight=100, max_window=100)
    await h.intake.assigned.wait()
    h.consumer.produce(P0, RESERVE + 300)
    await until(lambda: len(h.taken) == 100)
    await h.consumer.rebalance({P0}, member="m2")
    while len(h.taken) < RESERVE + 400:
        await until(lambda: any(lease._on_end for _, lease in h.taken[100:]) or len(h.taken) >= RESERVE + 400)
        for _, lease in h.taken[100:]:
            lease.finish()
    started = [record.offset for record, lease in h.taken[100:] if lease.maybe_started]
    assert started == list(range(RESERVE))


async def test_nothing_is_started_before_a_commit_says_that_it_may_be(harness: Any) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.commit_errors = [RequestTimedOutError()] * 3
    h.consumer.produce(P0, 2)
    await until(lambda: not h.consumer.commit_errors and len(h.taken) == 2)
    assert h.consumer.commits[0].keys() == {P0} and h.consumer.commits[0][P0][0] == 0
    assert h.consumer.last_state(P0)[1].reach == RESERVE


async def test_attempts_are_counted_unless_the_worker_leaves_in_order(harness: Any) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 2)
    await until(lambda: len(h.taken) == 2)
    h.taken[1][1].at_risk = lambda: True
    await h.taken[1][1].recorded()
    assert h.consumer.last_state(P0)[1].marks == {1: Mark(1, 1)}
    await h.consumer.rebalance({P0})
    await h.taken[1][1].recorded()
    assert h.consumer.last_state(P0)[1].marks == {1: Mark(1, 2)}
    h.consumer.commit_errors = [CommitFailedError()]  # no word at the end: as if it had died
    await h.consumer.rebalance({P0}, member="m2", generations=5)
    await until(lambda: len(h.taken) == 4)
    assert h.taken[2][1].before is None and h.taken[3][1].before == Mark(1, 2)
    h.taken[3][1].at_risk = lambda: True
    await h.taken[3][1].recorded()
    assert h.consumer.last_state(P0)[1].marks == {1: Mark(2, 7)}
    await h.intake.close()
    assert h.consumer.last_state(P0)[1].marks == {1: Mark(1, 2)}, "this attempt did not fail"


async def test_bounded_in_requests_and_polling_goes_on(harness: Any) -> None:
    h = harness(max_in_flight=4)
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 10)
    h.consumer.produce(P1, 10)
    await until(lambda: h.intake.in_flight == 4)
    await h.polls(5)
    assert len(h.taken) == 4 and h.consumer.paused() == {P0, P1}
    h.finish(0)
    assert h.consumer.paused() == set(), "resumed at once, not at the next poll"
    for i in range(1, 20):
        await until(lambda i=i: len(h.taken) > i)
        assert h.intake.in_flight <= 4
        h.finish(i)
    await until(lambda: h.intake.in_flight == 0)


async def test_bounded_in_bytes(harness: Any) -> None:
    h = harness(max_in_flight=100, max_in_flight_bytes=1000)
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 1, size=999)
    await until(lambda: len(h.taken) == 1)
    h.consumer.produce(P0, 1, size=600)
    await until(lambda: len(h.taken) == 2)
    h.consumer.produce(P0, 1)
    await h.polls(5)
    assert len(h.taken) == 2 and h.intake.in_flight_bytes == 1599
    h.finish(0)
    await until(lambda: len(h.taken) == 3)


async def test_the_window_behind_an_unfinished_record_is_bounded(harness: Any) -> None:
    h = harness(max_window=3)
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 1)
    await until(lambda: len(h.taken) == 1)
    for i in range(1, 3):
        h.consumer.produce(P0, 1)
        await until(lambda i=i: len(h.taken) > i)
        h.finish(i)
    await h.polls()
    assert h.consumer.paused() == {P0} and h.intake.in_flight == 1
    h.consumer.produce(P0, 1)
    h.consumer.produce(P1, 1)
    await until(lambda: len(h.taken) == 4)
    await h.polls()
    assert h.taken[3][0].partition == 1, "the other partition goes on"
    h.finish(0)
    await until(lambda: len(h.taken) == 5)


async def test_pausing_is_recomputed_at_every_assignment(harness: Any) -> None:
    h = harness(max_in_flight=2)
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 5)
    await until(lambda: h.intake.in_flight == 2)
    await h.polls()
    await h.consumer.rebalance({P0, P1})
    assert h.consumer.paused() == {P0, P1}, "still full: what is new is paused too"
    await h.consumer.rebalance({P1})
    assert h.intake.in_flight == 0 and h.consumer.paused() == set(), "what was lost counts no more"
    h.consumer.produce(P1, 1)
    await until(lambda: len(h.taken) == 3)


async def test_what_stays_ours_goes_on_and_is_taken_once(harness: Any) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 3)
    h.consumer.produce(P1, 2)
    await until(lambda: len(h.taken) == 5)
    mine = [lease for record, lease in h.taken if record.partition == 0]
    mine[0].finish()
    await h.consumer.rebalance({P0})
    assert {lease.partition.topic_partition for lease in h.lost} == {P1} and len(h.lost) == 2
    assert mine[1].epoch == 2, "events carry the new generation"
    await h.polls(5)
    assert len(h.taken) == 5, "a second delivery of what is in flight is recognised"
    mine[2].finish()
    mine[1].finish()
    await until(lambda: h.consumer.last_commit(P0) == 3)


@pytest.mark.parametrize("change", [{"member": "m2"}, {"generations": 2}])
async def test_a_partition_that_somebody_else_may_have_had_starts_anew(harness: Any, change: Any) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 2)
    await until(lambda: len(h.taken) == 2)
    before = [lease for _, lease in h.taken]
    await h.consumer.rebalance({P0}, **change)
    assert h.lost == before
    await until(lambda: len(h.taken) == 4)
    before[0].finish()
    await h.polls(5)
    assert h.consumer.last_commit(P0) == 0, "an old lease cannot finish a new delivery"


async def test_commits_at_revocation(harness: Any) -> None:
    h = harness(commit_interval_s=1000)
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 1)
    await until(lambda: h.taken)
    h.finish(0)
    await h.consumer.rebalance({P1})
    assert h.consumer.last_commit(P0) == 1


@pytest.mark.parametrize("error", [CommitFailedError(), RequestTimedOutError()])
async def test_a_failed_commit_is_repeated_and_the_loop_goes_on(harness: Any, error: Exception) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.commit_errors = [error, error]
    h.consumer.produce(P0, 1)
    await until(lambda: h.taken)
    h.finish(0)
    await until(lambda: h.consumer.last_commit(P0) == 1)


async def test_records_of_partitions_that_are_not_ours_are_dropped(harness: Any) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.intake._take(ConsumerRecord("plait.requests", 9, 0, 0, 0, None, b"", None, 0, 0, ()))
    assert h.intake.in_flight == 0 and h.taken == []


async def test_errors_while_polling_are_survived(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "RETRY_BACKOFF_S", 0.001)
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.poll_errors = [KafkaConnectionError()] * 3
    h.consumer.produce(P0, 1)
    await until(lambda: h.taken)
    assert len(h.made) == 1


async def test_a_consumer_that_keeps_failing_is_replaced(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "RETRY_BACKOFF_S", 0.001)
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 1)
    await until(lambda: h.taken)
    h.consumer.poll_errors = [KafkaConnectionError()] * 1000
    await until(lambda: len(h.made) == 2)
    assert h.made[0].stopped and len(h.lost) == 1
    h.consumer.produce(P0, 1)
    await until(lambda: len(h.taken) == 2)


async def test_a_record_that_cannot_be_decoded_costs_no_other(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "RETRY_BACKOFF_S", 0.001)
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.committed_errors = [KafkaConnectionError()]
    h.consumer.log[P1] += [POISON]
    h.consumer.produce(P0, 3)
    h.consumer.produce(P1, 2)
    await until(lambda: len(h.taken) == 6)
    taken = {(record.partition, record.offset): record for record, _ in h.taken}
    assert sorted(taken) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert isinstance(taken[1, 0], Unreadable)
    h.consumer.log[P1] += [POISON]
    h.consumer.produce(P0, 1)
    await until(lambda: len(h.taken) == 8)


async def test_another_log_under_the_same_name_is_read_from_its_beginning(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find(*_: Any) -> dict[Any, int]:
        return {P0: 0}

    monkeypatch.setattr(intake_module.positioning, "find", find)
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 3)
    await until(lambda: len(h.taken) == 3)
    h.consumer.log[P0] = []
    h.consumer.produce(P0, 2)
    h.consumer.poll_errors = [OffsetOutOfRangeError({P0: 3})]
    await until(lambda: len(h.taken) == 5)
    assert h.lost == [], "what was in flight is answered"
    h.finish(0, 1, 2)
    await h.polls(5)
    assert h.consumer.last_commit(P0) == 0, "its offsets are not those of the new log"
    h.finish(3, 4)
    await until(lambda: h.consumer.last_commit(P0) == 2)


async def test_requests_of_a_topic_that_is_gone_are_not_given_up(harness: Any) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 3)
    await until(lambda: len(h.taken) == 3)
    h.consumer.topic_gone = True
    await h.consumer.rebalance(set())
    assert h.lost == [] and h.intake.in_flight == 3
    h.finish(0, 1, 2)
    assert h.intake.in_flight == 0


async def test_a_topic_that_only_could_not_be_seen_is_read_on(harness: Any) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 3)
    await until(lambda: len(h.taken) == 3)
    before = [lease for _, lease in h.taken]
    h.consumer.topic_gone = True
    await h.consumer.rebalance(set())
    h.consumer.topic_gone = False
    await h.consumer.rebalance({P0})
    await until(lambda: len(h.taken) == 6)
    assert h.lost == before, "nobody answers twice"


async def test_a_position_that_is_not_there_can_be_a_reason_to_fail(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find(*_: Any) -> dict[Any, int]:
        raise intake_module.positioning.OutOfRange("offset 3 is out of range")

    monkeypatch.setattr(intake_module.positioning, "find", find)
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.poll_errors = [OffsetOutOfRangeError({P0: 3})]
    with pytest.raises(intake_module.positioning.OutOfRange, match="offset 3"):
        await asyncio.wait_for(asyncio.shield(h.task), 10)
    h.task = asyncio.create_task(asyncio.sleep(0))


async def test_a_lost_partition_has_no_lag(harness: Any) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 1)
    h.consumer.produce(P1, 1)
    await until(lambda: len(h.taken) == 2)
    h.finish(0, 1)
    await until(lambda: lags(h) == {"0", "1"})
    await h.consumer.rebalance({P1})
    await h.polls()
    await until(lambda: lags(h) == {"1"})


def lags(h: Any) -> set[str]:
    (metric,) = h.metrics.lag.collect()
    return {sample.labels["partition"] for sample in metric.samples}


async def test_draining_reads_no_more_but_commits(harness: Any) -> None:
    h = harness()
    await h.intake.assigned.wait()
    h.consumer.produce(P0, 1)
    await until(lambda: h.taken)
    h.intake.stop_reading()
    h.consumer.produce(P0, 1)
    await h.consumer.rebalance({P0, P1})
    await h.polls(5)
    assert len(h.taken) == 1 and h.consumer.paused() == {P0, P1}
    h.finish(0)
    await until(lambda: h.consumer.last_commit(P0) == 1)
