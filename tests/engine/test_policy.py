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


def test_spt_counts_prompt_and_expected_answer() -> None:
    brief, wordy, big = sequence("b", max_tokens=4), sequence("w", max_tokens=200), sequence("p", prompt=900)
    assert order(policy("spt"), wordy, big, brief) == "bwp"


def test_slo_is_by_latest_start_and_those_too_late_come_last() -> None:
    def due(name: str, at: float, prompt: int = 1) -> Sequence:
        return sequence(name, prompt, objectives=Objectives(first_token=at))

    soon, later, long, late = due("s", 3.0), due("l", 9.0), due("p", 3.5, prompt=2000), due("x", 0.001)
    assert order(policy("slo"), later, late, soon, long) == "pslx", "2,000 tokens take two seconds"
    assert late.late and not soon.late
    some = sequence("d", max_tokens=100, objectives=Objectives(deadline=60.0))
    assert order(policy("slo"), sequence("n", arrival=0.5), some, late) == "ndx", (
        "no objective: within 30 seconds"
    )


def test_what_is_too_late_is_found_out_while_it_waits() -> None:
    slo = policy("slo")
    seq = sequence("a", objectives=Objectives(first_token=3.0))
    order(slo, seq)
    assert 2.9 < seq.expires < 3.0 and not seq.late
    assert slo.expired(seq) > 1000 and seq.late


def test_default_puts_urgent_before_pressed_and_what_can_be_met_before_what_cannot() -> None:
    def asks(name: str, priority: int, at: float) -> Sequence:
        return sequence(name, priority=priority, arrival=0.1, objectives=Objectives(first_token=at))

    urgent, pressed, calm, late = asks("u", 7, 1.0), asks("p", 4, 0.3), asks("c", 4, 5.0), asks("l", 4, 0.001)
    assert order(policy("default"), late, calm, pressed, urgent) == "upcl"


def test_default_leaves_out_the_large_ones() -> None:
    asks = Objectives(first_token=5.0)
    small, large = sequence("s", objectives=asks), sequence("l", prompt=900, arrival=0.5, objectives=asks)
    assert order(policy("default"), large, small) == "sl"


def test_default_puts_back_a_tenant_that_got_more_than_its_share() -> None:
    one, other = sequence("a", tenant="greedy", arrival=0.9), sequence("b", tenant="modest", arrival=1.0)
    default = policy("default")
    assert order(default, one, other) == "ab"
    default.admitted(sequence("c", prompt=900, tenant="greedy"))
    assert default.rank(one) > default.rank(other)
    generous = policy("default", tenant_weights={"greedy": 1000.0})
    order(generous, one, other)
    generous.admitted(sequence("c", prompt=900, tenant="greedy"))
    assert generous.rank(one) < generous.rank(other)


@pytest.mark.parametrize(
    "name,running,waiting,yields",
    [
        ("fcfs", {"priority": 0}, {"priority": 9}, False),
        ("priority", {"priority": 4}, {"priority": 5}, True),
        ("priority", {"priority": 5}, {"priority": 5}, False),
        ("fair", {"tenant": "a"}, {"tenant": "b"}, False),
        ("default", {"priority": 4}, {"priority": 5}, True),
        ("default", {"priority": 5}, {"priority": 4}, False),
        ("default", {"priority": 4}, {"priority": 5, "objectives": Objectives(first_token=9.0)}, False),
        ("default", {"priority": 4}, {"priority": 5, "objectives": Objectives(first_token=2.2)}, True),
        ("slo", {}, {"objectives": Objectives(first_token=9.0)}, True),
        (
            "slo",
            {"objectives": Objectives(first_token=9.0)},
            {"objectives": Objectives(first_token=3.0)},
            False,
        ),
    ],
)
def test_who_makes_room_for_whom(
    name: str, running: dict[str, Any], waiting: dict[str, Any], yields: bool
) -> None:
    a, b, one = sequence("a", **running), sequence("b", **waiting), policy(name)
    order(one, a, b)
    assert one.yields(a, b, now=1.7) is yields
