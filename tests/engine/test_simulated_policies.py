"""What policies make of one small trace at overload. Simulated, so the same every time."""

from __future__ import annotations

import pytest

from plait.engine.sim.report import Report
from plait.engine.sim.run import simulate
from traces import device, rows

TRACE = rows(400, per_second=9.0, seed=5)


def outcome(policy: str, load: float, **settings: str) -> Report:
    return simulate(TRACE, device(num_blocks=300), policy=policy, load=load, **settings)


def test_at_a_low_load_nobody_misses_anything():
    for policy in ("fcfs", "default"):
        assert outcome(policy, 0.3).overall.slo_attainment == 1.0
    assert outcome("default", 0.3).overall.refused == 0


@pytest.mark.parametrize("load", [1.0, 1.5, 2.0])
def test_the_default_meets_more_objectives_at_overload(load):
    plain, ours = outcome("fcfs", load), outcome("default", load)
    assert plain.overall.slo_attainment < 0.75
    assert ours.overall.slo_attainment > plain.overall.slo_attainment + 0.15
    assert ours.goodput > plain.goodput
    assert ours.classes["interactive"].ttft_p99 <= 1.0
    assert ours.classes["interactive"].slo_attainment > 0.9


def test_giving_up_what_waits_in_vain_costs_nothing():
    served, given_up = outcome("default", 2.0, admission="off"), outcome("default", 2.0)
    assert served.overall.refused == 0 < given_up.overall.refused
    assert given_up.overall.slo_attainment > served.overall.slo_attainment - 0.02
