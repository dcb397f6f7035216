"""`plait simulate` as it is typed."""

from __future__ import annotations

import json
import sys

import pytest

from plait.engine.sim.profile import FOLDER
from plait.service.cli import run
from traces import HEADER, rows, write


@pytest.fixture
def trace(tmp_path):
    return write(tmp_path / "trace.csv", rows(60, per_second=5.0))


def test_one_object_on_standard_output(trace, capsys):
    arguments = [
        "simulate",
        "--trace",
        str(trace),
        "--profile",
        "h100-8b",
        "--load",
        "2",
        "--workers",
        "2",
        "--json",
    ]
    assert run(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slo_attainment"] == 1.0 and found["requests"] == 60
    assert (found["load"], found["workers"], found["policy"], found["profile"]) == (
        2.0,
        2,
        "default",
        "h100-8b",
    )
    assert set(found["classes"]) == {"interactive", "standard", "batch"}
    assert sum(c["requests"] for c in found["classes"].values()) == 60
    assert 0 < found["ttft_p50"] <= found["ttft_p99"] < 1 and found["goodput"] > 5
    assert run(arguments) == 0
    assert json.loads(capsys.readouterr().out) == found, "the same seed gives the same result"


def test_a_table_for_people(trace, capsys):
    assert run(["simulate", "-t", str(trace), "--profile", "h100-8b", "--policy", "fcfs"]) == 0
    out = capsys.readouterr().out
    assert "interactive" in out and "100.0%" in out and "goodput" in out and "policy=fcfs" in out


@pytest.mark.parametrize("kind,begin", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_plot(trace, tmp_path, kind, begin):
    path = tmp_path / f"plot.{kind}"
    arguments = ["simulate", "-t", str(trace), "--profile", "h100-8b", "--plot", str(path)]
    assert run([*arguments, "--compare", "fcfs"]) == 0
    assert path.read_bytes().startswith(begin)


@pytest.mark.parametrize(
    "options,message",
    [
        (["--policy", "best"], "policy must be one of"),
        (["--profile", "h900"], "no such profile; there are"),
        (["--plot", "x.gif"], "ends in .png or .svg"),
        (["--plot", "nowhere/x.png"], "there is no folder"),
        (["--workers", "0"], "--workers"),
        (["--load", "0"], "--load"),
        (["--trace", "nothing.csv"], "nothing.csv"),
    ],
)
def test_wrong_usage_is_one_line(trace, capsys, options, message):
    assert run(["simulate", "--trace", str(trace), *options]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_bad_row_is_named(tmp_path, capsys):
    path = tmp_path / "bad.csv"
    path.write_text(f"{HEADER}\n2026-01-01 00:00:00,10,ten\n")
    assert run(["simulate", "--trace", str(path)]) == 2
    assert "line 2, column GeneratedTokens: 'ten'" in capsys.readouterr().err


def test_drawing_without_matplotlib_says_what_to_install(trace, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["simulate", "-t", str(trace), "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'plait[plot]'" in capsys.readouterr().err


def test_a_profile_of_one_s_own(trace, tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text((FOLDER / "h100-8b.toml").read_text().replace("fixed = 4.0e-3", "fixed = 1.0"))
    assert run(["simulate", "-t", str(trace), "--profile", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ttft_p50"] > 1.0


def test_a_record_becomes_a_picture(tmp_path, capsys):
    trace = write(tmp_path / "trace.csv", rows(60, per_second=200.0))
    record = tmp_path / "record.csv"
    assert run(["simulate", "-t", str(trace), "--record", str(record), "--load", "3"]) == 0
    for name, begin in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.html", b"<!doctype html>")):
        assert run(["trace-view", str(record), "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(begin)
    assert run(["trace-view", str(record)]) == 0
    assert (tmp_path / "record.svg").exists()
    assert "60 requests" in capsys.readouterr().out
    svg = (tmp_path / "a.svg").read_text()
    assert all(color in svg for color in ("#d95f02", "#1b9e77")), "prefill and decode are in the picture"


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["nothing.csv"], "nothing.csv"),
        (["trace.csv"], "line 1: the columns are not"),
        (["trace.csv", "--out", "x.pdf"], "ends in .svg or .html or .png"),
        (["record.csv", "--first", "100000"], "no iteration from 100000"),
    ],
)
def test_trace_view_says_what_is_wrong(trace, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert run(["simulate", "-t", str(trace), "--record", "record.csv"]) == 0
    assert run(["trace-view", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_wrong_admission_is_refused(trace, capsys):
    assert run(["simulate", "-t", str(trace), "--admission", "maybe"]) == 2
    assert "auto, predict or off" in capsys.readouterr().err
