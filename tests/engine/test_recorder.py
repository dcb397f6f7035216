"""The record of what the scheduler did: bounded, and true to the iterations."""

from __future__ import annotations

from itertools import pairwise

import pytest

from plait.engine import recorder
from plait.engine.recorder import Recorder, RecordError, read
from plait.engine.sim.mix import mix
from plait.engine.sim.trace import Row
from plait.engine.sim.worker import Worker
from traces import device, rows


def record(trace: list[Row], **engine: int) -> tuple[Recorder, Worker]:
    profile = device(**engine)
    found = Recorder()
    worker = Worker(profile, profile.config(policy="fcfs"), recorder=found)
    worker.run(mix(trace, limit=profile.max_tokens_total))
    return found, worker


def test_a_lone_request_is_prefilled_in_chunks_and_decodes():
    found, worker = record([Row(0.0, 100, 5)])
    spans = [(s.state, s.first, s.last, s.tokens) for s in found.spans]
    assert spans == [("prefill", 0, 1, 100), ("decode", 2, 5, 4)]
    assert [s.seconds for s in found.spans] == pytest.approx([0.0, 2 * 0.010 + 0.100])
    assert worker.iterations == 6


def test_a_waiting_request_waits_from_its_arrival_on():
    found, _ = record([Row(0.0, 60, 10), Row(0.05, 60, 3)], max_running=1)
    second = [s for s in found.spans if s.request == "r1"]
    assert [s.state for s in second] == ["waiting", "prefill", "decode"]
    assert second[0].first == 1 and second[0].seconds == pytest.approx(0.05)
    assert second[0].last + 1 == second[1].first


def test_spans_hold_every_token_once_and_do_not_overlap():
    found, worker = record(rows(60, per_second=40.0), num_blocks=40)
    assert worker.scheduler.preemptions > 0
    for answer in worker.answers:
        spans = [s for s in found.spans if s.request == answer.job.request.request_id]
        assert all(a.last < b.first for a, b in pairwise(spans))
        assert all(a.state != b.state for a, b in pairwise(spans))
        computed = sum(s.tokens for s in spans)
        if answer.seq and answer.code is None:
            known = len(answer.seq.tokens) - 1  # the last one is not computed
            assert computed >= known if answer.seq.preemptions else computed == known


def test_it_is_bounded(monkeypatch):
    monkeypatch.setattr(recorder, "MAX_REQUESTS", 10)
    monkeypatch.setattr(recorder, "MAX_ITERATIONS", 50)
    found, worker = record(rows(60, per_second=40.0))
    assert worker.iterations > 50 == found.iterations
    assert {s.request for s in found.spans} == {f"r{n}" for n in range(10)}
    assert max(s.last for s in found.spans) < 50


def test_it_is_read_as_it_was_written(tmp_path):
    found, _ = record(rows(30, per_second=40.0))
    found.write(tmp_path / "r.csv")
    spans = read(tmp_path / "r.csv")
    assert [(s.request, s.priority, s.state, s.first, s.last, s.tokens) for s in spans] == [
        (s.request, s.priority, s.state, s.first, s.last, s.tokens) for s in found.spans
    ]
    assert [s.seconds for s in spans] == pytest.approx([s.seconds for s in found.spans], abs=1e-3)


@pytest.mark.parametrize(
    "line,message",
    [
        ("r,4,decode,0,1,2", "line 2: has 6 cells"),
        ("r,4,decode,0,one,2,0.0", "line 2, column last: 'one'"),
        ("r,4,sleeping,0,1,2,0.0", "line 2, column state: 'sleeping'"),
        ("r,4,decode,5,1,2,0.0", "line 2, column first: 5"),
    ],
)
def test_a_bad_record_names_line_and_column(tmp_path, line, message):
    path = tmp_path / "r.csv"
    path.write_text(",".join(recorder.COLUMNS) + "\n" + line + "\n")
    with pytest.raises(RecordError) as error:
        read(path)
    assert message in str(error.value)


def test_another_file_is_no_record(tmp_path):
    (tmp_path / "r.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RecordError, match="line 1"):
        read(tmp_path / "r.csv")
