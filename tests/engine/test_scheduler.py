"""The scheduler: properties over random traffic, and the cases that went wrong elsewhere."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from plait.engine.policies import POLICIES
from plait.engine.sequence import Status
from scheduling import Drive, Driven


class Traffic(Driven):
    """Random arrivals, priorities, sizes and cancellations in tiny pools under tiny budgets."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        max_running=st.integers(1, 6),
        token_budget=st.integers(1, 24),
        max_preemptions=st.integers(0, 3),
        watermark=st.sampled_from([0.0, 0.02, 0.3, 0.9]),
        policy=st.sampled_from(sorted(POLICIES)),
        batching=st.sampled_from(["continuous", "continuous", "dynamic", "static"]),
        max_wait_seconds=st.sampled_from([0.0, 5.0, 30.0, 1e9]),
        window=st.sampled_from([0.0, 3.0]),
        long_tokens=st.sampled_from([0, 8]),
    )
    def begin(
        self, batching: str, max_wait_seconds: float, window: float, long_tokens: int, **knobs: Any
    ) -> None:
        if batching == "static":
            max_wait_seconds = min(
                max_wait_seconds, 30.0
            )  # or the last ones wait for company that never comes
        levers = {"batching": batching, "max_wait_seconds": max_wait_seconds, "long_tokens": long_tokens}
        levers |= {"batch_window_ms": 1000 * window, "aging_seconds": 2.0, "tenant_weights": {"b": 3.0}}
        self.drive = Drive(**knobs, levers=levers)

    @precondition(lambda self: self.drive.capacity > 1)
    @rule(
        data=st.data(),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 9),
        same=st.booleans(),
        tenant=st.sampled_from("ab"),
        slo=st.tuples(*[st.sampled_from([None, 0.5, 3.0, 20.0])] * 3),
    )
    def add(
        self, data: st.DataObject, max_tokens: int, priority: int, same: bool, tenant: str, slo: Any
    ) -> None:
        prompt = data.draw(st.integers(1, self.drive.capacity - 1), label="prompt")
        # The choices of one request arrive at the same instant.
        arrival = self.drive.seqs[-1].timeline.arrived if same and self.drive.seqs else None
        self.drive.add(prompt, max_tokens, priority, arrival, tenant=tenant, slo=slo)

    @precondition(lambda self: self.drive.seqs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.drive.cancel(data.draw(st.sampled_from(self.drive.seqs)))


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_sequences_with_equal_keys_do_not_block_each_other(policy: str) -> None:
    drive = Drive(num_blocks=4, block_size=4, policy=policy)
    for _ in range(3):
        drive.add(prompt=4, max_tokens=8, arrival=1.0)
    drive.finish_all()
    assert drive.scheduler.preemptions > 0


def test_the_urgent_one_grows_at_the_cost_of_the_other() -> None:
    drive = Drive(num_blocks=4, block_size=4, watermark=0.0)
    late = drive.add(prompt=4, max_tokens=8, priority=0)
    drive.step()
    urgent = drive.add(prompt=4, max_tokens=8, priority=9)
    drive.finish_all()
    assert urgent.preemptions == 0 and late.preemptions > 0
    assert late.timeline.preemptions and late.timeline.scheduled < late.timeline.preemptions[0]


def test_preemptions_are_bounded_when_urgent_ones_arrive_whenever_it_runs() -> None:
    """vllm#41951: after max_preemptions the sequence comes first, whatever else arrives."""
    drive = Drive(num_blocks=6, block_size=2, max_running=4, max_preemptions=2, watermark=0.0)
    victim = drive.add(prompt=2, max_tokens=9, priority=0)
    while victim.status is not Status.FINISHED and len(drive.seqs) < 300:
        drive.step()
        if victim.status is Status.RUNNING:
            drive.add(prompt=1, max_tokens=6, priority=9)
    assert victim.status is Status.FINISHED
    assert victim.preemptions == 2
    drive.finish_all()


def test_a_partly_prefilled_prompt_does_not_starve() -> None:
    """sglang#34554, mlxcel#1013: decodes and later, more urgent prompts go on beside it, and it goes on as well."""
    drive = Drive(num_blocks=64, block_size=4, max_running=4, token_budget=8)
    runner = drive.add(prompt=1, max_tokens=40, priority=9)
    drive.step()
    long = drive.add(prompt=60, max_tokens=2, priority=0)
    drive.step()
    taken = 1
    while long.output_len == 0:
        drive.add(prompt=6, max_tokens=3, priority=9)
        had, known = long.computed, runner.output_len
        drive.step()
        taken += 1
        assert long.computed > had
        assert runner.output_len == known + 1, "a long prompt holds up a decode"
    assert taken <= 60 // (8 - 4) + 1
    drive.finish_all()


def test_every_running_sequence_is_considered_when_some_are_preempted() -> None:
    """vllm#49097: removal while iterating skips nobody; the checks are in Drive.step."""
    drive = Drive(num_blocks=8, block_size=1, max_running=6, watermark=0.0, policy="fcfs")
    for _ in range(6):
        drive.add(prompt=1, max_tokens=8)
    drive.finish_all()
    assert drive.scheduler.preemptions > 2


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preempted_sequence_comes_back_before_new_ones(policy: str) -> None:
    """vllm#5578: those of its own class that have not run yet wait behind it."""
    drive = Drive(num_blocks=6, block_size=2, max_running=4, watermark=0.0, policy=policy)
    first, second = drive.add(prompt=4, max_tokens=6), drive.add(prompt=4, max_tokens=6)
    while not second.preemptions:
        drive.add(prompt=1, max_tokens=2)
        drive.step()
    new = [seq for seq in drive.seqs if seq.status is Status.WAITING and seq is not second]
    assert first.preemptions == 0 and new
    while second.status is Status.WAITING:
        drive.step()
        assert second.status is Status.RUNNING or not any(seq.computed for seq in new)
    drive.finish_all()


@pytest.mark.parametrize("prompt,max_tokens,expected", [(15, 9, 16), (1, 99, 16), (8, 8, 16)])
def test_one_sequence_may_fill_the_pool(prompt: int, max_tokens: int, expected: int) -> None:
    """nano-vllm#274: the only running sequence exhausts the pool and ends; the next one runs."""
    drive = Drive(num_blocks=4, block_size=4)
    seq, other = drive.add(prompt, max_tokens), drive.add(3, 2)
    drive.finish_all()
    assert len(seq.tokens) == expected and len(other.tokens) == 5


def test_a_reserve_keeps_out_who_would_be_preempted_at_once() -> None:
    """sglang#26248: one retraction does not lead to the next."""
    drive = Drive(num_blocks=10, block_size=4, watermark=0.2, policy="fcfs")
    drive.add(prompt=32, max_tokens=4)
    drive.step()
    second = drive.add(prompt=4, max_tokens=4)
    drive.step()
    assert second.status is Status.WAITING, "one block is free and two are the reserve"
    drive.finish_all()
    assert drive.scheduler.preemptions == 0


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted", "finished"])
def test_cancelled_in_every_state(state: str) -> None:
    """vllm#52969: nothing leaks, and what is already over stays as it was."""
    drive = Drive(num_blocks=4, block_size=4, max_running=2, token_budget=1, watermark=0.0)
    seq = drive.add(prompt=4, max_tokens=9, priority=0) if state != "prefilling" else drive.add(15, 1)
    if state != "waiting":
        drive.step()
    if state == "decoding":
        drive.step()
    if state == "preempted":
        drive.add(prompt=4, max_tokens=8, priority=9)
        while not seq.preemptions:
            drive.step()
    if state == "finished":
        drive.finish_all()
    assert {
        "waiting": seq.status is Status.WAITING,
        "prefilling": 0 < seq.computed < 15,
        "decoding": seq.output_len > 0 and seq.status is Status.RUNNING,
        "preempted": seq.status is Status.WAITING and seq.preemptions == 1,
        "finished": seq.reason == "length",
    }[state]
    drive.cancel(seq)
    drive.cancel(seq)
    assert seq.reason == ("length" if state == "finished" else "cancelled")
    drive.finish_all()


def calls(action: Any) -> int:
    """How many functions, of Python and of C, run during `action`."""
    seen = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    # What the collector calls is not the scheduler's.
    gc.disable()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return seen


@pytest.mark.parametrize("policy", POLICIES)
def test_an_iteration_costs_the_same_however_many_wait(policy: str) -> None:
    costs = []
    for waiting in (10, 10_000):
        levers = {"max_wait_seconds": 1e9}
        drive = Drive(num_blocks=8, block_size=4, max_running=4, policy=policy, levers=levers)
        for i in range(waiting):
            drive.add(prompt=5, max_tokens=12, priority=i * 7 % 10)
        drive.step()
        costs.append([calls(drive.scheduler.schedule)])
        seqs = [c.seq for c in drive.scheduler.schedule()]
        costs[-1].append(calls(lambda seqs=seqs, d=drive: [d.scheduler.finish(s, "cancelled") for s in seqs]))
        costs[-1].append(calls(drive.scheduler.schedule))
    # Entries of those that left are dropped when they come up: a few calls more or less, whenever that is.
    assert all(abs(many - few) <= 8 for few, many in zip(*costs, strict=True)), costs


def test_a_more_urgent_one_takes_the_seat_of_a_less_urgent_one() -> None:
    drive = Drive(num_blocks=32, max_running=2, policy="default")
    calm = [drive.add(prompt=4, max_tokens=30, priority=1), drive.add(prompt=4, max_tokens=30, priority=2)]
    drive.step()
    same = drive.add(prompt=4, max_tokens=3, priority=1)
    drive.step()
    assert same.status is Status.WAITING and drive.scheduler.preemptions == 0
    urgent = drive.add(prompt=4, max_tokens=3, priority=7)
    assert urgent in {chunk.seq for chunk in drive.step()}
    assert [seq.preemptions for seq in calm] == [1, 0], "the least urgent one"
    drive.finish_all()


def test_nobody_is_preempted_in_vain() -> None:
    """The seat of one that yields is not enough where memory of others would be needed, too."""
    drive = Drive(num_blocks=8, block_size=4, max_running=2, watermark=0.0, policy="priority")
    equal, low = (
        drive.add(prompt=16, max_tokens=12, priority=5),
        drive.add(prompt=4, max_tokens=4, priority=0),
    )
    drive.step()
    big = drive.add(prompt=24, max_tokens=2, priority=5)
    while equal.status is Status.RUNNING:
        drive.step()
        assert low.preemptions == 0
    drive.finish_all()
    assert big.preemptions == 0


def test_a_prompt_chosen_in_this_iteration_gives_its_share_back_when_it_is_preempted() -> None:
    """vllm#23347."""
    drive = Drive(num_blocks=16, block_size=4, max_running=2, token_budget=16, watermark=0.0)
    low, other = (
        drive.add(prompt=40, max_tokens=2, priority=0),
        drive.add(prompt=4, max_tokens=20, priority=5),
    )
    drive.step()
    drive.step()
    urgent = drive.add(prompt=15, max_tokens=2, priority=9)
    chunks = {chunk.seq: chunk.count for chunk in drive.step()}
    assert low.preemptions == 1 and low not in chunks
    assert chunks == {other: 1, urgent: 15}, "with what the victim had, all of the prompt fits"
    drive.finish_all()


def test_after_a_preemption_for_memory_more_has_to_be_free() -> None:
    """sglang#26248: until one has ended, who would fill the pool to the brim again stays out."""
    levers = {"high_watermark": 0.5}
    drive = Drive(num_blocks=10, block_size=1, max_running=3, watermark=0.0, policy="fcfs", levers=levers)
    first, second = drive.add(prompt=3, max_tokens=7), drive.add(prompt=3, max_tokens=7)
    while not second.preemptions:
        drive.step()
    back_at = len(first.tokens)
    while first.status is not Status.FINISHED:
        drive.step()
        assert second.status is Status.WAITING, f"back when {back_at} of 10 blocks were in use"
    drive.step()
    assert second.status is Status.RUNNING and second.preemptions == 1
    drive.finish_all()


def test_long_ones_are_kept_to_their_share() -> None:
    levers = {"long_tokens": 20, "long_share": 0.25}
    drive = Drive(num_blocks=100, max_running=4, token_budget=16, policy="fcfs", levers=levers)
    long = [drive.add(prompt=40, max_tokens=2) for _ in range(3)]
    brief = [drive.add(prompt=4, max_tokens=3) for _ in range(6)]
    chunks = {chunk.seq: chunk.count for chunk in drive.step()}
    assert chunks[long[0]] == 4 and long[1] not in chunks, "a quarter of the seats and of the tokens"
    assert all(seq in chunks for seq in brief[:3]), "shorter ones pass"
    while brief[-1].status is not Status.FINISHED:
        drive.step()
        assert sum(seq.status is Status.RUNNING for seq in long) <= 1
    assert next(c.count for c in drive.step() if c.seq.long) > 4, "alone it takes what there is"
    drive.finish_all()


@pytest.mark.parametrize(
    "batching,window,starts", [("static", 0, 20), ("dynamic", 5000, 5), ("continuous", 5000, 5)]
)
def test_a_batch_starts_when_it_is_full_or_its_time_has_come(
    batching: str, window: float, starts: float
) -> None:
    levers = {"batching": batching, "batch_window_ms": window, "max_wait_seconds": 20.0}
    drive = Drive(num_blocks=32, max_running=3, policy="fcfs", levers=levers)
    one = drive.add(prompt=2, max_tokens=3)
    drive.scheduler.rehearse(True)
    drive.scheduler.took(60.0)
    assert drive.scheduler.times.observations == 0
    assert drive.scheduler.pause() == 0, "a warm-up waits for nobody"
    drive.scheduler.rehearse(False)
    while not drive.step():
        assert drive.scheduler.pause() > 0
    assert drive.now - one.timeline.arrived == starts
    drive.finish_all()
    full = [drive.add(prompt=2, max_tokens=2 + i, arrival=drive.now) for i in range(4)]
    assert {chunk.seq for chunk in drive.step()} == set(full[:3]), "a full batch does not wait"
    joined = []
    while full[2].status is not Status.FINISHED:
        drive.step()
        joined.append(full[3].status is Status.RUNNING)
    assert any(joined) is (batching == "continuous"), "nobody joins until all have ended"
    drive.finish_all()


def test_those_that_decode_keep_their_time_while_a_long_prompt_comes_in() -> None:
    """mlxcel#1013, on a device where a full budget would take half a second and a token was promised every 0.1 s."""
    drive = Drive(num_blocks=500, block_size=4, max_running=4, token_budget=256, policy="default")
    drive.seconds = lambda chunks: 0.02 + sum(0.001 if c.count == 1 else 0.002 * c.count for c in chunks)
    runner = drive.add(prompt=1, max_tokens=400, slo=(None, 0.1, None))
    for _ in range(5):
        drive.add(prompt=30, max_tokens=2)
        drive.step()
    long, iterations = drive.add(prompt=1900, max_tokens=2), 0
    while long.output_len == 0:
        had = long.computed
        drive.step()
        iterations += 1
        assert long.computed > had
        if iterations > 10:  # what was saved up before is used up
            took = drive.now - runner.timeline.first_token
            assert took / (runner.output_len - 1) <= 0.105
    assert iterations < 120
    drive.finish_all()


def test_a_request_too_late_does_not_stop_the_others_and_is_not_forgotten() -> None:
    """Everything at once under the default policy: those that can still make it come first, the late ones follow."""
    drive = Drive(num_blocks=64, block_size=4, max_running=1, policy="default")
    late = drive.add(prompt=4, max_tokens=2, slo=(0.001, None, None))
    fine = [drive.add(prompt=4, max_tokens=2, slo=(200.0, None, None)) for _ in range(5)]
    drive.finish_all()
    assert late.timeline.finished > max(seq.timeline.finished for seq in fine)
