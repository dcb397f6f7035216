"""Simulations: traces are read right, every request is answered once, and the clock does the profile's arithmetic."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.engine.policies import POLICIES
from plait.engine.sim import profile as profiles
from plait.engine.sim.mix import CLASSES, TENANTS, Class, Job, spread
from plait.engine.sim.mix import mix as mix_for
from plait.engine.sim.report import met, summarize, tpot, ttft
from plait.engine.sim.run import simulate
from plait.engine.sim.trace import Row, TraceError, read
from plait.engine.sim.worker import Worker
from traces import HEADER, device, rows, write


def mix(trace: list[Row], limit: int = 1000, **options: Any) -> list[Job]:
    return mix_for(trace, limit=limit, **options)


def test_a_trace_is_read_as_it_was_written(tmp_path):
    made = rows(50, per_second=3.0)
    found = read(write(tmp_path / "t.csv", made))
    assert [(r.prompt, r.output) for r in found] == [(r.prompt, r.output) for r in made]
    assert [r.at for r in found] == pytest.approx([r.at for r in made], abs=1e-5)


def test_columns_are_found_by_name_and_rows_put_in_order(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "\ufeffGeneratedTokens,user, TIMESTAMP ,ContextTokens\n7,a,2026-01-01 00:00:09,5\n\n"
        "3,b,2026-01-01 00:00:07.2500000,4\n"
    )
    assert read(path) == [Row(0.0, 4, 3), Row(1.75, 5, 7)]


@pytest.mark.parametrize(
    "text,message",
    [
        ("", "line 1: no column TIMESTAMP"),
        (HEADER, "holds no requests"),
        ("TIMESTAMP,ContextTokens\n", "line 1: no column GeneratedTokens"),
        (f"{HEADER}\n2026-01-01 00:00:00,1,1\nyesterday,1,1\n", "line 3, column TIMESTAMP: 'yesterday'"),
        (f"{HEADER}\n2026-01-01 00:00:00,-1,1\n", "line 2, column ContextTokens: '-1'"),
        (f"{HEADER}\n2026-01-01 00:00:00,1.5,1\n", "line 2, column ContextTokens: '1.5'"),
        (f"{HEADER}\n2026-01-01 00:00:00,5,0\n", "line 2, column GeneratedTokens: '0'"),
        (f"{HEADER}\n2026-01-01 00:00:00,²,1\n", "line 2, column ContextTokens: '²'"),
        (f"{HEADER}\n2026-01-01 00:00:00,5\n", "line 2, column GeneratedTokens: is missing"),
        (
            f"{HEADER}\n2026-01-01 00:00:00,5,1\n2026-01-01 00:00:00Z,5,1\n",
            "TIMESTAMP: some have a time zone",
        ),
        (f"{HEADER}\n2026-01-01 00:00:00,{'9' * 140_000},1\n", "is not CSV: field larger"),
    ],
)
def test_a_bad_trace_names_line_and_column(tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as error:
        read(path)
    assert str(path) in str(error.value) and message in str(error.value)


def test_a_binary_file_is_no_trace(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="UTF-8"):
        read(path)


def test_the_mix_has_its_shares_and_is_the_same_at_every_load():
    trace = rows(4000, per_second=10)
    jobs = mix(trace, seed=3)
    counts = Counter(job.kind.name for job in jobs)
    assert all(abs(counts[kind.name] / 4000 - kind.share) < 0.03 for kind in CLASSES)
    by_tenant = Counter(job.request.tenant for job in jobs)
    assert len(by_tenant) == 8 and by_tenant["tenant-1"] > 5 * by_tenant["tenant-8"]
    assert set(by_tenant) == set(TENANTS)
    faster = mix(trace, load=4.0, seed=3)
    assert [(j.kind, j.request.tenant) for j in jobs] == [(j.kind, j.request.tenant) for j in faster]
    assert [j.request.arrival for j in faster] == pytest.approx([j.request.arrival / 4 for j in jobs])
    assert [j.kind for j in mix(trace, seed=4)] != [j.kind for j in jobs]


def test_the_scheduler_is_not_told_how_long_answers_get():
    jobs = mix(rows(200, per_second=10), limit=5000)
    assert {job.request.sampling.max_tokens for job in jobs} == {None, 1024}
    assert all(job.output < 1024 for job in jobs)


def test_requests_are_spread_by_their_ids_alone():
    jobs = mix(rows(1000, per_second=10))
    shares = spread(jobs, 4)
    assert sorted(j.request.request_id for s in shares for j in s) == sorted(
        j.request.request_id for j in jobs
    )
    assert all(200 < len(share) < 300 for share in shares)
    again = spread(list(reversed(jobs)), 4)
    assert [{j.request.request_id for j in s} for s in again] == [
        {j.request.request_id for j in s} for s in shares
    ]


def test_a_lone_request_takes_what_the_profile_says():
    job = mix([Row(0.0, 100, 5)])[0]
    answer = Worker(device(), device().config()).run([job])[0]
    budget = 64
    first = 2 * 0.010 + (budget + 100 - budget) * 0.001
    assert ttft(answer) == pytest.approx(first)
    assert tpot(answer) == pytest.approx(0.011)
    assert answer.seq.timeline.finished == pytest.approx(first + 4 * 0.011)
    assert answer.seq.output_len == 5 and answer.seq.reason == "stop"


def test_an_iteration_is_the_sum_of_its_parts():
    profile = profiles.load("h100-8b")
    answer = Worker(profile, profile.config()).run([mix([Row(0.0, 300, 2)])[0]])[0]
    it = profile.iteration
    assert ttft(answer) == pytest.approx(it.fixed + 300 * it.prefill_token + 300 * 301 / 2 * it.pair)
    assert tpot(answer) == pytest.approx(it.fixed + it.decode + 301 * it.kv_token)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 40),
    rate=st.sampled_from([0.5, 5.0, 100.0]),
    blocks=st.integers(8, 80),
    policy=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 1000),
)
def test_every_request_is_answered_once_and_time_goes_forward(n, rate, blocks, policy, seed):
    profile = device(blocks, noise=0.1)
    jobs = mix(rows(n, rate, seed), profile.max_tokens_total, seed=seed)
    worker = Worker(profile, profile.config(policy=policy), seed)
    answers = worker.run(jobs)
    assert [a.job for a in answers] == jobs
    for answer in answers:
        assert answer.code in (None, "prompt_too_long", "overloaded", "deadline_exceeded")
        if answer.code is not None:
            assert not met(answer)
            continue
        seq, times = answer.seq, answer.seq.timeline
        moments = [times.arrived, times.scheduled, times.first_token, times.finished]
        assert moments == sorted(moments)
        full = min(seq.prompt_len + answer.job.output, worker.model.max_tokens_total)
        assert seq.reason == "stop" and len(seq.tokens) == full
    assert not worker.scheduler.has_work()
    worker.scheduler.check()
    assert worker.now >= max(j.request.arrival for j in jobs)
    assert worker.busy <= worker.now + 1e-9


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_copies_take_their_time(kind):
    """A block is copied in 10 ms. A CPU makes the copies itself, a GPU beside its iterations."""
    made = replace(device(45), device=kind, block_bytes=10_000_000)
    jobs = mix([Row(0.0, 60, 90)] * 8, made.max_tokens_total)
    ends = {}
    for preemption in ("swap", "recompute"):
        worker = Worker(made, made.config(policy="fcfs", preemption=preemption, prefix_cache=False))
        worker.run(jobs)
        kv = worker.scheduler.kv
        kv.check_idle()
        ends[preemption] = worker.now, kv.store.swapped_out + kv.store.swapped_in, worker.iterations
        assert worker.scheduler.preemptions > 0
    assert ends["swap"][1] > 0 == ends["recompute"][1]
    if kind == "cpu":
        computing = worker.busy
        assert ends["recompute"][0] == pytest.approx(computing)
        assert ends["swap"][0] > 0.010 * ends["swap"][1]


def test_the_same_seed_gives_the_same_result():
    trace, profile = rows(200, 20.0), device(100, noise=0.05)
    one, two, other = (simulate(trace, profile, policy="fcfs", workers=2, seed=s) for s in (1, 1, 2))
    assert one == two != other


def test_what_is_over_its_deadline_is_ended():
    """It does not take the device from those that can still make theirs."""
    profile = device(max_running=2, num_blocks=130)
    batch = mix([Row(0.0, 900, 90)] * 30, classes=[Class("batch", 1.0, 1, deadline=20.0)])
    answers = Worker(profile, profile.config(policy="fcfs")).run(batch)
    over = [a for a in answers if a.code == "deadline_exceeded"]
    assert 0 < len(over) < len(batch)
    assert [met(a) for a in answers] == [a not in over for a in answers]
    assert all(20.0 <= a.seq.timeline.finished < 20.2 for a in over)
    assert sum(a.seq.timeline.scheduled is None for a in over) >= len(over) - 2
    assert summarize(answers).expired == len(over)


def test_refused_requests_count_as_missed():
    profile = device(max_running=1, max_waiting=2)
    report = simulate([Row(0.0, 20, 3)] * 10, profile, policy="fcfs")
    assert report.overall.refused == 7
    assert report.overall.slo_attainment == pytest.approx(0.3)
    assert report.overall.requests == 10


@pytest.mark.parametrize("name", profiles.SHIPPED)
def test_shipped_profiles_are_whole(name):
    profile = profiles.load(name)
    assert profile.num_blocks > 100 and profile.iteration.fixed > 0 and profile.iteration.prefill_token > 0
    assert profile.name == name


@pytest.mark.parametrize(
    "change,message",
    [
        (("fixed = 4.0e-3", "fixd = 1"), "iteration.fixd: unknown key"),
        (("fixed = 4.0e-3", ""), "iteration.fixed: is missing"),
        (("fixed = 4.0e-3", "fixed = -1.0"), "iteration.fixed: -1.0 is not"),
        (("num_blocks = 60_491", "num_blocks = 1.5"), "num_blocks: 1.5 is not"),
        (("num_blocks = 60_491", ""), "num_blocks: is missing"),
        (("max_running = 256", "max_runing = 256"), "max_runing"),
        (("max_running = 256", "max_running = 0"), "max_running"),
        (("[iteration]", "[iteration"), "is not TOML"),
    ],
)
def test_a_bad_profile_names_what_is_wrong(tmp_path, change, message):
    text = (profiles.FOLDER / "h100-8b.toml").read_text()
    assert change[0] in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(*change))
    with pytest.raises(profiles.ProfileError) as error:
        profiles.load(str(path))
    assert message in str(error.value) and str(path) in str(error.value)


def test_an_unknown_profile_is_told_which_there_are():
    with pytest.raises(profiles.ProfileError, match="h100-8b"):
        profiles.load("h900")
