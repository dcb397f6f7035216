"""Who comes first. A policy orders sequences: the smallest key runs next, the largest is preempted first.

A key must not change while its sequence waits, so that the waiting queue can be a heap. Both policies put a
preempted sequence before those of its class that never ran: it arrived earlier.
"""

from __future__ import annotations

from typing import Any, Protocol

from plait.engine.sequence import Sequence


class Policy(Protocol):
    def key(self, seq: Sequence) -> tuple[Any, ...]: ...


class Fcfs:
    """First come, first served."""

    def key(self, seq: Sequence) -> tuple[float]:
        return (seq.timeline.arrived,)


class Priority:
    """The more urgent first (9 before 0), among equals the earlier."""

    def key(self, seq: Sequence) -> tuple[int, float]:
        return (-seq.priority, seq.timeline.arrived)


POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority}


def make_policy(name: str) -> Policy:
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, not {name!r}")
    return POLICIES[name]()
