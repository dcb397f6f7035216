"""Admission: what cannot meet its objectives is refused, what can is not, and nobody whose time is over runs."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.engine.admission import RETRY, WARM
from plait.engine.api import GenerationRequest, Objectives, RequestRefused, SamplingParams
from plait.engine.forecast import Arrivals
from plait.engine.sequence import Sequence, Status
from plait.engine.sim.mix import Class, Job
from plait.engine.sim.report import met
from plait.engine.sim.worker import Answer, Worker
from traces import device

ITERATION, TOKEN = 0.010, 0.001  # seconds, of the device in traces.py


def job(name: str, at: float, prompt: int = 30, output: int = 5, *, priority: int = 4, **slo: Any) -> Job:
    asked = {key: at + value if key in ("first_token", "deadline") else value for key, value in slo.items()}
    request = GenerationRequest(
        name, [1] * prompt, SamplingParams(), priority, "", at, slo=Objectives(**asked)
    )
    return Job(request, Class("test", 1.0, priority), output)


def warm_worker(policy: str = "default", **engine: Any) -> Worker:
    """Idle, with a time model that has seen prompts and decodes of all sizes."""
    profile = device(**{"num_blocks": 400, **engine})
    worker = Worker(profile, profile.config(policy=policy))
    for at in range(6):
        jobs = [job(f"w{at}-{n}", worker.now + 0.02 * n, 1 + 37 * n % 200, 20) for n in range(6)]
        worker.run(jobs)
    assert worker.admission.forecaster.observations >= WARM and not worker.scheduler.has_work()
    worker.answers.clear()
    return worker


def run(worker: Worker, *jobs: Job) -> dict[str, Answer]:
    """Answers by name; the jobs' times count from now on."""
    now = worker.now
    moved = [shifted(j, now) for j in jobs]
    worker.answers = []
    return {a.job.request.request_id: a for a in worker.run(moved)}


def shifted(j: Job, by: float) -> Job:
    slo = j.request.slo
    first, deadline = (None if t is None else t + by for t in (slo.first_token, slo.deadline))
    slo = Objectives(first, slo.per_token, deadline, slo.serve_late)
    r = j.request
    return Job(
        GenerationRequest(
            r.request_id, r.prompt_token_ids, r.sampling, r.priority, r.tenant, r.arrival + by, slo=slo
        ),
        j.kind,
        j.output,
    )


def test_the_time_model_knows_the_device():
    worker = warm_worker()
    assert worker.scheduler.times.error < 0.05


@settings(max_examples=30, deadline=None)
@given(prompt=st.integers(2, 800), share=st.floats(1.25, 10))
def test_an_idle_engine_refuses_nothing_that_fits(prompt, share):
    worker = warm_worker()
    iterations = -(-prompt // 64)
    needed = iterations * ITERATION + prompt * TOKEN
    answer = run(
        worker,
        job(
            "r",
            0.0,
            prompt,
            3,
            first_token=share * needed,
            per_token=share * 0.011,
            deadline=share * (needed + 1),
        ),
    )["r"]
    assert answer.code is None and met(answer)


@settings(max_examples=30, deadline=None)
@given(prompt=st.integers(30, 800), share=st.floats(0.1, 0.8))
def test_what_cannot_fit_is_refused_for_ever(prompt, share):
    worker = warm_worker()
    needed = -(-prompt // 64) * ITERATION + prompt * TOKEN
    seq = sequence(worker, job("r", 0.0, prompt, first_token=share * needed))
    with pytest.raises(
        RequestRefused, match=r"slo.ttft_ms: the first token would come to .* even when idle"
    ) as refused:
        worker.admission.check(seq, worker.now)
    assert refused.value.code == "overloaded" and refused.value.retry_after == inf
    assert worker.admission.refused == {"slo.ttft_ms": 1}


def sequence(worker: Worker, j: Job) -> Sequence:
    return Sequence.of(shifted(j, worker.now).request, worker.now)


@pytest.mark.parametrize(
    "slo,field",
    [
        ({"first_token": 0.5}, "slo.ttft_ms"),
        ({"per_token": 0.0115}, "slo.tpot_ms"),
        ({"deadline": 1.0}, "slo.deadline_ms"),
    ],
)
def test_a_refusal_names_the_objective_and_when_to_come_back(slo, field):
    """Eight seats decode, ten prompts of the same kind wait."""
    worker = warm_worker()
    jobs = [job(f"b{n}", 0.0, 200, 60) for n in range(18)]
    answers = run(worker, *jobs, job("r", 0.5, 20, 5, priority=0, **slo))
    assert answers["r"].code == "overloaded"
    assert all(a.code is None for name, a in answers.items() if name != "r")
    assert list(worker.admission.refused) == [field]


def test_coming_back_after_the_hint_works():
    worker = warm_worker()
    for n in range(40):
        worker._add(shifted(job(f"b{n}", 0.0, 200, 60), worker.now))
    for _ in range(20):
        worker._step()
    with pytest.raises(RequestRefused) as refused:
        worker.admission.check(sequence(worker, job("r", 0.0, 20, first_token=2.0, priority=0)), worker.now)
    assert RETRY[0] < refused.value.retry_after < 30
    later = worker.now + 1.5 * refused.value.retry_after
    while worker.now < later and worker.scheduler.has_work():
        worker._step()
    worker.admission.check(sequence(worker, job("r", 0.0, 20, first_token=2.0, priority=0)), worker.now)


def test_an_urgent_request_does_not_wait_behind_the_backlog():
    worker = warm_worker("priority", admission="predict")
    backlog = [job(f"b{n}", 0.0, 400, 80, priority=1) for n in range(60)]
    urgent = job("urgent", 1.0, 50, 5, priority=9, first_token=0.8)
    humble = job("humble", 1.0, 50, 5, priority=0, first_token=0.8)
    answers = run(worker, *backlog, urgent, humble)
    assert answers["urgent"].code is None and met(answers["urgent"])
    assert answers["humble"].code == "overloaded"


def test_served_late_when_the_request_allows_it():
    worker = warm_worker()
    jobs = [job(f"b{n}", 0.0, 300, 60) for n in range(20)]
    late = job("late", 0.5, 20, 5, priority=0, first_token=0.1, deadline=0.2, serve_late=True)
    answer = run(worker, *jobs, late)["late"]
    assert answer.code is None and answer.seq.reason == "stop" and not met(answer)


def test_a_cold_model_refuses_nothing():
    profile = device()
    worker = Worker(profile, profile.config())
    answers = run(worker, *[job(f"r{n}", 0.0, 300, 2, first_token=0.01, deadline=100.0) for n in range(3)])
    assert not worker.admission.refused or worker.admission.forecaster.observations < WARM
    seq = sequence(Worker(profile, profile.config()), job("r", 0.0, 300, first_token=0.01))
    Worker(profile, profile.config()).admission.check(seq, 0.0)
    assert sum(a.code is None for a in answers.values()) >= 1


def test_what_ran_before_a_crash_is_not_refused():
    worker = warm_worker()
    request = shifted(job("r", 0.0, 300, first_token=0.001), worker.now).request
    request.output_token_ids = [5, 6]
    worker.admission.check(Sequence.of(request, worker.now), worker.now)


def test_the_expired_never_run():
    worker = warm_worker("fcfs", max_running=1)
    jobs = [job(f"b{n}", 0.0, 100, 40) for n in range(10)]
    answer = run(worker, *jobs, job("doomed", 0.0, 100, 40, deadline=2.0))["doomed"]
    assert answer.code == "deadline_exceeded" and answer.seq.message.startswith("slo.deadline_ms")
    assert answer.seq.timeline.scheduled is None
    assert 2.0 <= answer.seq.timeline.finished - answer.seq.timeline.arrived < 2.1


def test_what_runs_ends_at_its_deadline():
    worker = warm_worker("fcfs")
    answer = run(worker, job("long", 0.0, 100, 400, deadline=2.0))["long"]
    assert answer.code == "deadline_exceeded" and answer.seq.output_len > 100
    worker.scheduler.kv.check_idle()


def test_given_up_while_waiting_says_so():
    """It was let in, and more urgent ones that came later took its time."""
    worker = warm_worker(max_running=1)
    first = [job("a", 0.0, 60, 60, priority=9)]
    hopeful = job("h", 0.01, 30, 5, priority=1, first_token=1.5)
    urgent = [job(f"u{n}", 0.02 + 0.3 * n, 60, 60, priority=9) for n in range(8)]
    answer = run(worker, *first, hopeful, *urgent)["h"]
    assert answer.code == "overloaded" and answer.seq is not None
    assert answer.seq.timeline.scheduled is None and answer.seq.message.startswith("slo.ttft_ms: after")
    assert RETRY[0] <= answer.seq.retry_after <= RETRY[1]
    assert answer.seq.timeline.finished <= 1.5 + answer.seq.timeline.arrived


@pytest.mark.parametrize(
    "policy,wanted,predicts",
    [
        ("default", "auto", True),
        ("slo", "auto", True),
        ("fcfs", "auto", False),
        ("spt", "auto", False),
        ("fcfs", "predict", True),
        ("default", "off", False),
    ],
)
def test_who_predicts(policy, wanted, predicts):
    profile = device()
    assert Worker(profile, profile.config(policy=policy, admission=wanted)).admission.predicts is predicts


def test_moments_of_the_finished_are_not_kept():
    worker = warm_worker()
    for n in range(300):
        run(worker, job(f"r{n}", 0.0, 5, 2, deadline=500_000.0))
    assert len(worker.admission._moments) <= 80


def test_the_load_by_priority_is_an_average():
    arrivals = Arrivals()
    assert arrivals.above(0, 5.0) == 0.0
    for tenth in range(1200):
        arrivals.add(7, 0.03, tenth / 10)
        arrivals.add(2, 0.02, tenth / 10)
    assert arrivals.above(2, 120.0) == pytest.approx(0.3, rel=0.05)
    assert arrivals.above(1, 120.0) == pytest.approx(0.5, rel=0.05)
    assert arrivals.above(7, 120.0) == 0.0
    assert arrivals.above(1, 400.0) < 0.01
    arrivals.add(9, 1e6, 401.0)
    assert arrivals.above(0, 401.0) == 0.5


OBJECTIVES = st.dictionaries(
    st.sampled_from(["first_token", "per_token", "deadline"]), st.sampled_from([0.05, 0.5, 3.0])
)
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.01, 0.3]),
        st.integers(1, 300),
        st.integers(1, 30),
        st.integers(0, 9),
        OBJECTIVES,
        st.booleans(),
    ),
    min_size=20,
    max_size=120,
)


@settings(max_examples=25, deadline=None)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(64, 200),
    max_running=st.integers(1, 8),
    policy=st.sampled_from(["default", "fcfs", "priority", "slo"]),
)
def test_every_request_has_one_end_and_the_pool_is_whole(requests, num_blocks, max_running, policy):
    profile = device(num_blocks=num_blocks, max_running=max_running)
    worker = Worker(profile, profile.config(admission="predict", policy=policy))
    jobs, at = [], 0.0
    for n, (after, prompt, output, priority, asks, serve_late) in enumerate(requests):
        at += after
        jobs.append(job(f"r{n}", at, prompt, output, priority=priority, serve_late=serve_late, **asks))
    answers = worker.run(jobs)
    assert [a.job for a in answers] == jobs
    for answer in answers:
        slo, seq = answer.job.request.slo, answer.seq
        if answer.code is not None:
            assert answer.code in ("overloaded", "deadline_exceeded") and not slo.serve_late
        if seq is not None:
            assert answer.code != "deadline_exceeded" or seq.timeline.finished >= slo.deadline
            assert seq.status is Status.FINISHED
            assert seq.code != "overloaded" or seq.output_len == 0
            if slo.deadline is not None and not slo.serve_late and seq.timeline.scheduled is not None:
                assert seq.timeline.scheduled < slo.deadline
    worker.scheduler.kv.check_idle()
