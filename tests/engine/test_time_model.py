"""The iteration-time model, predicted lengths, and what an iteration may take on."""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.engine.api import GenerationRequest, Objectives, SamplingParams
from plait.engine.budget import MAX_SKIPS, Pace
from plait.engine.lengths import Lengths
from plait.engine.sequence import Sequence
from plait.engine.time_model import PRIORS, Load, TimeModel

DEVICE = (4e-3, 13e-6, 17e-6, 20e-9, 0.8e-9)


def seconds(load: Load, device: tuple[float, ...] = DEVICE) -> float:
    return sum(c * x for c, x in zip(device, (1, *load), strict=True))


def iteration(rng: random.Random) -> Load:
    decodes, prefill = rng.randrange(0, 256), rng.choice([0, 0, rng.randrange(16, 2048)])
    return Load(prefill, decodes, decodes * rng.randrange(50, 3000), prefill * rng.randrange(1, 2000))


def trained(
    rounds: int, noise: float = 0.0, spikes: float = 0.0, device: tuple[float, ...] = DEVICE
) -> TimeModel:
    model, rng = TimeModel("cuda"), random.Random(1)
    for _ in range(rounds):
        load = iteration(rng)
        took = seconds(load, device) * max(0.1, rng.gauss(1, noise))
        model.observe(load, took * (30 if rng.random() < spikes else 1))
    return model


@pytest.mark.parametrize("noise,spikes,bound", [(0.0, 0.0, 0.02), (0.1, 0.0, 0.06), (0.05, 0.03, 0.08)])
def test_it_learns_a_device(noise: float, spikes: float, bound: float) -> None:
    model, rng = trained(800, noise, spikes), random.Random(2)
    for load in [iteration(rng) for _ in range(100)]:
        assert model.predict(*load) == pytest.approx(seconds(load), rel=bound)


def test_it_follows_a_device_that_becomes_slower() -> None:
    model, rng = trained(500), random.Random(3)
    slower = tuple(6 * c for c in DEVICE)
    for _ in range(600):
        load = iteration(rng)
        model.observe(load, seconds(load, slower))
    assert model.predict(1000, 100, 100_000, 0) == pytest.approx(
        seconds(Load(1000, 100, 100_000), slower), rel=0.1
    )


def test_an_hour_of_decodes_does_not_make_it_forget_what_a_prompt_costs() -> None:
    model, rng = trained(500), random.Random(4)
    for _ in range(20_000):
        load = Load(0, 60 + rng.randrange(8), 60_000 + rng.randrange(20_000))
        model.observe(load, seconds(load))
    assert model.predict(2000, 0, 0) == pytest.approx(seconds(Load(2000)), rel=0.3)
    assert model.error < 0.05


def test_the_error_it_reports_is_that_of_its_predictions() -> None:
    assert trained(400).error < 0.02
    assert 0.1 < trained(400, noise=0.3).error < 0.5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.builds(
                Load,
                st.integers(0, 4000),
                st.integers(0, 300),
                st.integers(0, 10**6),
                st.floats(0, 1e8, allow_nan=False),
            ),
            st.floats(-1, 1e4, allow_nan=False),
        ),
        max_size=40,
    ),
    st.sampled_from(sorted(PRIORS)),
)
def test_whatever_it_is_told_more_work_never_takes_less_time(
    told: list[tuple[Load, float]], device: str
) -> None:
    model = TimeModel(device)
    for load, took in told:
        model.observe(load, took)
    assert all(0 <= t < inf for t in model.theta)
    assert 0 <= model.error <= 1
    assert model.predict(10, 10, 10, 10) <= model.predict(20, 11, 10, 30)


def answer(length: int, tenant: str = "a", max_tokens: int | None = None) -> Sequence:
    seq = Sequence.of(GenerationRequest("x", [1], SamplingParams(max_tokens=max_tokens), tenant=tenant), 0.0)
    seq.tokens += [1] * length
    return seq


def test_lengths_are_each_tenants_own_where_enough_is_known() -> None:
    lengths = Lengths()
    for i in range(40):
        lengths.ended(answer(100 + i, "brief"))
        lengths.ended(answer(1000 + i, "wordy"))
    assert lengths.remaining(answer(0, "brief")) == 120
    assert lengths.remaining(answer(0, "wordy")) == 1020
    assert 139 <= lengths.remaining(answer(0, "new")) <= 1000
    assert lengths.remaining(answer(0, "wordy", max_tokens=50)) == 50
    assert lengths.remaining(answer(130, "brief")) == 5, "of those that got as long as this one"
    assert lengths.remaining(answer(500, "brief")) >= 1, "longer than any"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 500), max_size=450), st.integers(0, 600), st.sampled_from([None, 1, 40, 700]))
def test_lengths_stay_within_what_may_come(ended: list[int], produced: int, limit: int | None) -> None:
    lengths = Lengths()
    for length in ended:
        lengths.ended(answer(length))
    left = lengths.remaining(answer(produced, max_tokens=limit))
    assert left >= 1 and (limit is None or left <= max(1, limit - produced))
    assert lengths.all.ranked == sorted(lengths.all.order) and len(lengths.all.order) <= 200


def decode(slack: float, per_token: float | None = 0.1, skipped: int = 0) -> Sequence:
    """A decode whose next token is due at `slack`."""
    seq = answer(1)
    seq.slo = Objectives(per_token=per_token)
    seq.timeline.first_token = slack - (per_token or 0.0)
    seq.computed, seq.skipped = 1, skipped
    return seq


def cpu() -> Pace:
    """10 ms an iteration, 1 ms a decode, 1 ms a prompt's token."""
    return Pace(TimeModel("cpu"), floor=16)


def test_prompts_get_what_the_tightest_decode_leaves() -> None:
    pace = cpu()
    for slack, tokens in ((0.1, 80 - 10 - 2), (0.5, 400 - 12), (0.02, 40 - 12), (-0.3, 40 - 12)):
        seqs = [decode(slack), decode(slack + 1)]
        assert pace.leave_out(seqs, 0.0, must=lambda seq: False) == set()
        assert pace.prompt_tokens(Load(0, 2, 2)) == pytest.approx(tokens, abs=1)
    pace.leave_out([decode(0.01, per_token=0.02)], 0.0, must=lambda seq: False)
    assert pace.prompt_tokens(Load(0, 1, 1)) == 16, "the floor"


def test_decodes_that_nobody_waits_for_do_not_hold_up_prompts() -> None:
    pace = cpu()
    for seqs in ([], [decode(0.0, per_token=None)], [decode(-2.1)]):
        pace.leave_out(seqs, 0.0, must=lambda seq: False)
        assert pace.prompt_tokens(Load(0, len(seqs), 0)) == inf


def test_decodes_with_slack_are_left_out_for_one_without() -> None:
    pace = cpu()
    tight, calm = [decode(0.05)] * 1, [decode(1.0 + i) for i in range(60)]
    left_out = pace.leave_out(tight + calm, 0.0, must=lambda seq: False)
    # 40 ms: 10 and 30 decodes.
    assert not left_out & set(tight) and len(left_out) == pytest.approx(31, abs=1)
    assert left_out == set(calm[-len(left_out) :]), "those with the most slack"


def test_nobody_is_left_out_for_long() -> None:
    pace = cpu()
    waited = [decode(5.0, skipped=MAX_SKIPS) for _ in range(60)]
    assert pace.leave_out([decode(0.05), *waited], 0.0, must=lambda seq: False) == set()
    first = [decode(5.0) for _ in range(60)]
    assert pace.leave_out([decode(0.05), *first], 0.0, must=lambda seq: True) == set()
