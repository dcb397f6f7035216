"""Which requests an engine gets after crashes, and who is to blame, against an engine that is only counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from plait.engine.api import GenerationRequest, Timeline
from plait.engine.live import Live
from plait.engine.trials import HARMLESS_AFTER, Trials


def live(name: str) -> Live:
    text: Any = SimpleNamespace(stopped=False, finish=lambda: "", push=lambda token: "")
    return Live(GenerationRequest(name, [1]), lambda output: None, text, Timeline(0.0))


@dataclass
class Parent:
    """Serves `seats` requests at a time, 100 tokens each; `poison` kills the engine after some of its tokens."""

    poison: dict[str, int]
    max_restarts: int = 3
    seats: int = 4
    live: dict[str, Live] = field(default_factory=dict)
    engine: list[Live] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)
    crashes: int = 0

    def __post_init__(self) -> None:
        self.trials = Trials(self.max_restarts)

    def submit(self, name: str) -> None:
        x = self.live[name] = live(name)
        if self.trials.admits(x):
            self.give(x)

    def give(self, x: Live) -> None:
        assert not x.sent and not x.over
        x.sent = True
        self.engine.append(x)

    def end(self, x: Live, reason: str) -> None:
        del self.live[x.id]
        x.over = True
        assert x.id not in self.ended
        self.ended[x.id] = reason

    def iterate(self) -> None:
        running = self.engine[: self.seats]
        for x in running:
            x.running = True
        if any(x.since >= self.poison.get(x.id, 1000) for x in running):
            self.crash()
            return
        for x in running:
            x.since += 1
            x.produced.append(0)
            x.timeline.first_token = 1.0
            self.trials.passed(x)
            if len(x.produced) >= 100:
                self.engine.remove(x)
                self.end(x, "length")
        for x in self.trials.next():
            self.give(x)

    def crash(self) -> None:
        self.crashes += 1
        for x in self.trials.blame(self.live.values()):
            self.end(x, "error")
        self.engine = []
        for x in self.trials.restart(self.live.values()):
            self.give(x)

    def run(self) -> None:
        for _ in range(5000):
            if not self.live:
                return
            self.iterate()
        raise AssertionError("requests hang")


@pytest.mark.parametrize("max_restarts", [1, 2, 3, 5])
@pytest.mark.parametrize("after", [0, 1, HARMLESS_AFTER - 1])
@pytest.mark.parametrize("place", [0, 3, 6, 11])
def test_only_the_guilty_one_ends_with_an_error(place: int, after: int, max_restarts: int) -> None:
    parent = Parent({f"r{place}": after}, max_restarts)
    for i in range(12):
        parent.submit(f"r{i}")
    parent.run()
    assert {name for name, reason in parent.ended.items() if reason == "error"} == {f"r{place}"}
    assert len(parent.ended) == 12
    assert parent.crashes == max_restarts + 1


@pytest.mark.parametrize("seats", [1, 3, 12])
def test_two_guilty_ones(seats: int) -> None:
    parent = Parent({"r2": 0, "r5": 0}, seats=seats)
    for i in range(8):
        parent.submit(f"r{i}")
    parent.run()
    assert {name for name, reason in parent.ended.items() if reason == "error"} == {"r2", "r5"}


def test_what_comes_during_the_trials_waits_and_is_not_blamed() -> None:
    parent = Parent({"bad": 0})
    for name in ("a", "bad", "b"):
        parent.submit(name)
    while parent.crashes < 2:
        parent.iterate()
    parent.submit("late")
    assert parent.trials.held == [parent.live["late"]] and not parent.live["late"].sent
    parent.run()
    assert parent.ended == {"a": "length", "bad": "error", "b": "length", "late": "length"}


def test_crashes_that_are_nobodys_fault_end_nobody() -> None:
    parent = Parent({})
    for i in range(6):
        parent.submit(f"r{i}")
    for _ in range(10):
        for _ in range(HARMLESS_AFTER):
            parent.iterate()
        parent.crash()
    parent.run()
    assert set(parent.ended.values()) == {"length"} and len(parent.ended) == 6


def test_an_idle_engine_that_dies_is_nobodys_fault() -> None:
    trials = Trials(1)
    waiting = live("waiting")
    assert trials.admits(waiting)
    for _ in range(5):
        assert trials.blame([waiting]) == []
        assert trials.restart([waiting]) == [waiting]


def test_the_one_on_trial_is_cancelled() -> None:
    parent = Parent({"bad": 0})
    for name in ("bad", "a", "b"):
        parent.submit(name)
    while parent.crashes < 2:
        parent.iterate()
    first = parent.trials.suspects[0]
    parent.engine.remove(first)
    parent.end(first, "cancelled")
    for x in parent.trials.next():
        parent.give(x)
    parent.run()
    assert len(parent.ended) == 3
