"""Who comes first."""

from __future__ import annotations

import pytest

from plait.engine.api import GenerationRequest
from plait.engine.policy import make_policy
from plait.engine.sequence import Sequence


def order(policy: str, *arrivals: tuple[int, float]) -> list[int]:
    """Indices of sequences of (priority, arrival) in the order of the policy."""
    seqs = [
        Sequence.of(GenerationRequest(str(i), [1], priority=priority, arrival=arrival), now=99.0)
        for i, (priority, arrival) in enumerate(arrivals)
    ]
    return [int(seq.id) for seq in sorted(seqs, key=make_policy(policy).key)]


def test_fcfs_knows_only_arrival() -> None:
    assert order("fcfs", (0, 3.0), (9, 2.0), (4, 1.0)) == [2, 1, 0]


def test_priority_is_nine_first_and_then_arrival() -> None:
    assert order("priority", (4, 1.0), (9, 3.0), (0, 0.5), (9, 2.0)) == [3, 1, 0, 2]


def test_a_request_without_an_arrival_arrives_now() -> None:
    assert Sequence.of(GenerationRequest("a", [1]), now=7.0).timeline.arrived == 7.0


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="fcfs, priority, not 'best'"):
        make_policy("best")
