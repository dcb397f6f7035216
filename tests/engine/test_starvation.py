"""Nobody starves: adversaries that a policy prefers arrive at every iteration, and the bound of `Scheduler` holds.

The bound itself is checked by `Drive`, for every sequence, in every iteration.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.engine.policies import POLICIES
from plait.engine.sequence import Sequence, Status
from scheduling import Drive


def besieged(policy: str, max_wait: float, **knobs: Any) -> tuple[Drive, Sequence]:
    """A drive, and one that asks for little attention: low in priority, long, without an objective."""
    levers = {"max_wait_seconds": max_wait, "aging_seconds": 1e6, **knobs.pop("levers", {})}
    drive = Drive(**{"num_blocks": 16, "max_preemptions": 10**6, **knobs}, policy=policy, levers=levers)
    for number in range(drive.max_running):
        drive.add(prompt=4, max_tokens=20, priority=9, tenant=f"first-{number}")
    drive.step()
    return drive, drive.add(prompt=20, max_tokens=6, priority=0, tenant="patient")


def attack(drive: Drive, number: int, prompt: int = 1, max_tokens: int = 2) -> None:
    """One that every policy but first come, first served likes better; a tenant of its own has got nothing yet."""
    drive.add(prompt, max_tokens, priority=9, tenant=f"new-{number}", slo=(500.0, None, None))


@pytest.mark.parametrize("policy", ["default", "priority", "spt"])
def test_without_the_bound_it_would_starve(policy: str) -> None:
    """So that the test below shows something. In the other policies time itself brings everybody to the front."""
    drive, seq = besieged(policy, max_wait=1e9, max_running=2)
    for step in range(300):
        attack(drive, 2 * step)
        attack(drive, 2 * step + 1)
        drive.step()
    assert seq.output_len == 0 and seq.status is Status.WAITING


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_with_the_bound_it_ends_in_time(policy: str, data: st.DataObject) -> None:
    drive, seq = besieged(
        policy,
        max_wait=data.draw(st.sampled_from([0.0, 7.0, 25.0]), "max_wait"),
        num_blocks=data.draw(st.integers(8, 20), "num_blocks"),
        max_running=data.draw(st.integers(1, 3), "max_running"),
        token_budget=data.draw(st.integers(1, 12), "token_budget"),
        levers={"long_tokens": data.draw(st.sampled_from([0, 10]), "long_tokens")},
    )
    for step in range(150):
        for number in range(data.draw(st.integers(0, 3), "arrivals")):
            attack(
                drive,
                3 * step + number,
                data.draw(st.integers(1, 12), "prompt"),
                data.draw(st.integers(1, 8), "max_tokens"),
            )
        drive.step()
        if seq.status is Status.FINISHED:
            break
    assert seq in drive.due or seq.status is Status.FINISHED
    for other in drive.seqs:
        drive.cancel(other)
    drive.check_idle()
