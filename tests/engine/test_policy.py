"""Who comes first."""

from __future__ import annotations

from typing import Any

import pytest

from plait.engine.api import GenerationRequest, Objectives, SamplingParams
from plait.engine.config import EngineConfig
from plait.engine.lengths import Lengths
from plait.engine.outlook import Outlook
from plait.engine.policies import make_policy
from plait.engine.policies.base import Policy
from plait.engine.sequence import Sequence
from plait.engine.time_model import TimeModel


def policy(name: str, **levers: Any) -> Policy:
    return make_policy(EngineConfig(policy=name, **levers), Outlook(TimeModel(), Lengths(), token_budget=256))


def sequence(
    name: str, prompt: int = 1, max_tokens: int = 8, objectives: Objectives | None = None, **fields: Any
) -> Sequence:
    fields = {"arrival": 1.0, **fields}
    request = GenerationRequest(name, [1] * prompt, SamplingParams(max_tokens=max_tokens), **fields)
    request.slo = objectives or Objectives()
    return Sequence.of(request, now=99.0)


def order(policy: Policy, *seqs: Sequence, now: float = 0.0) -> str:
    """Names of the sequences in the order of the policy, when all of them wait."""
    for seq in seqs:
        policy.queued(seq)
        seq.key, seq.expires = policy.key(seq, now)
    return "".join(seq.id for seq in sorted(seqs, key=policy.rank))


def test_fcfs_knows_only_arrival() -> None:
    a, b, c = (
        sequence(n, arrival=t, priority=p) for n, t, p in (("a", 3.0, 0), ("b", 2.0, 9), ("c", 1.0, 4))
    )
    assert order(policy("fcfs"), a, b, c) == "cba"


def test_priority_is_nine_first_and_waiting_makes_up_for_it() -> None:
    urgent, calm, old = (
        sequence("u", priority=9, arrival=50.0),
        sequence("c", priority=4, arrival=50.0),
        sequence("o"),
    )
    old.priority, old.timeline.arrived = 4, -1.0
    assert order(policy("priority", aging_seconds=100), urgent, calm, old) == "uoc"
    assert order(policy("priority", aging_seconds=10), urgent, calm, old) == "ouc"


def test_a_request_without_an_arrival_arrives_now() -> None:
    assert Sequence.of(GenerationRequest("a", [1]), now=7.0).timeline.arrived == 7.0


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="default, fcfs, spt, priority, fair, slo, not 'best'"):
        policy("best")
