"""The sampler against plain implementations and transformers' processors; and that a row depends on itself alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.noise import gumbel
from plait.engine.sampler import Sampler, adjust, choose, keep_above, keep_top_k, keep_top_p, lanes
from plait.engine.sequence import Sequence

V = 1000
EOS = frozenset({7})


def sequence(
    sampling: SamplingParams, seat: int = 0, prompt: int = 3, output: tuple[int, ...] = ()
) -> Sequence:
    request = GenerationRequest(
        f"{seat}", list(range(10, 10 + prompt)), sampling, output_token_ids=list(output)
    )
    seq = Sequence.of(request, now=0.0)
    seq.seat = seat
    return seq


def logits(rows: int = 1, seed: int = 0, width: int = V) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


def draw(row: Tensor, sampling: SamplingParams, vocab: int = V, **kwargs: Any) -> int:
    tokens, _ = Sampler(4, vocab, EOS).draw(row, [sequence(sampling, **kwargs)])
    return tokens[0]


def draws(row: Tensor, sampling: SamplingParams, times: int) -> np.ndarray:
    """Tokens of `times` rows that differ in their seeds alone."""
    sampler = Sampler(256, row.shape[-1], EOS)
    out: list[int] = []
    for start in range(0, times, 256):
        seqs = [sequence(replace(sampling, seed=start + i), seat=i) for i in range(min(256, times - start))]
        out += sampler.draw(row.expand(len(seqs), -1), seqs)[0]
    return np.array(out)


def plain_probabilities(row: Tensor, s: SamplingParams) -> np.ndarray:
    """Sorts everything, in float64 and numpy, one filter after the other."""
    x = row[0].double().numpy() / s.temperature
    p = np.exp(x - x.max())
    order = np.argsort(-p, kind="stable")
    if s.top_k:
        p[order[s.top_k :]] = 0
    p /= p.sum()
    if s.top_p < 1:
        reached = np.cumsum(p[order])
        p[order[np.searchsorted(reached, s.top_p) + 1 :]] = 0
    p[p < s.min_p * p.max()] = 0
    return p / p.sum()


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0, top_k=20),
    SamplingParams(top_p=0.8),
    SamplingParams(top_k=50, top_p=0.5),
    SamplingParams(temperature=3.0, min_p=0.05),
    SamplingParams(temperature=1.5, top_k=300, top_p=0.95, min_p=0.01),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_tokens_have_the_distribution_that_was_asked_for(sampling: SamplingParams) -> None:
    """Chi-square over the likely tokens and one bin for the rest; the seeds are fixed, so this cannot flake."""
    row, times = logits(width=64), 20_000
    expected = plain_probabilities(row, sampling) * times
    seen = np.bincount(draws(row, sampling, times), minlength=64)
    assert not seen[expected == 0].any(), "a token that the filters had removed"
    likely = expected >= 20
    observed = np.append(seen[likely], seen[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum())
    keep = wanted > 0
    chi2 = ((observed[keep] - wanted[keep]) ** 2 / wanted[keep]).sum()
    degrees = keep.sum() - 1
    assert chi2 < degrees + 5 * math.sqrt(2 * degrees) + 5


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_filters_keep_what_those_of_transformers_keep(sampling: SamplingParams) -> None:
    for seed in range(5):
        row = logits(seed=seed)
        theirs = row.clone()
        if sampling.temperature != 1:
            theirs = TemperatureLogitsWarper(sampling.temperature)(None, theirs)
        if sampling.top_k:
            theirs = TopKLogitsWarper(sampling.top_k)(None, theirs)
        if sampling.top_p < 1:
            theirs = TopPLogitsWarper(sampling.top_p)(None, theirs)
        if sampling.min_p:
            theirs = MinPLogitsWarper(sampling.min_p)(None, theirs)
        ours = row / sampling.temperature
        ours = ours - ours.max(-1, keepdim=True).values
        if sampling.top_k:
            ours = keep_top_k(ours, torch.tensor([[sampling.top_k]]), sampling.top_k)
        if sampling.top_p < 1:
            ours = keep_top_p(ours, torch.tensor([[sampling.top_p]]))
        if sampling.min_p:
            ours = keep_above(ours, torch.tensor([[math.log(sampling.min_p)]]))
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1))


def test_penalties_bias_and_the_ban_on_ending_are_those_of_transformers() -> None:
    seq = sequence(SamplingParams(repetition_penalty=1.7), output=(20, 21, 20, 500))
    row, ids = logits(), torch.tensor([seq.tokens])
    ours = row[0].clone()
    adjust(ours, seq, EOS)
    torch.testing.assert_close(ours, RepetitionPenaltyLogitsProcessor(1.7)(ids, row.clone())[0])

    seq.sampling = SamplingParams(logit_bias={5: 2.5, 999: -100.0})
    ours = row[0].clone()
    adjust(ours, seq, EOS)
    theirs = SequenceBiasLogitsProcessor([[[5], 2.5], [[999], -100.0]])(ids, row.clone())
    torch.testing.assert_close(ours, theirs[0])

    seq.sampling = SamplingParams(min_tokens=5)
    ours = row[0].clone()
    adjust(ours, seq, EOS)
    theirs = MinNewTokensLengthLogitsProcessor(seq.prompt_len, 5, [7])(ids, row.clone())
    torch.testing.assert_close(ours, theirs[0])


def test_presence_and_frequency_count_the_output_alone() -> None:
    """OpenAI's formula: mu[j] - c[j] * frequency - (c[j] > 0) * presence, c counting generated tokens."""
    seq = sequence(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), output=(20, 21, 20, 20, 999))
    row = logits()[0]
    expected = row.clone()
    for token, count in {20: 3, 21: 1, 999: 1}.items():
        expected[token] -= 0.5 + 0.25 * count
    adjust(row, seq, EOS)
    torch.testing.assert_close(row, expected)


def mixed_rows(count: int, vocab: int = V) -> list[SamplingParams]:
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=5),
        SamplingParams(seed=3, top_p=0.3),
        SamplingParams(seed=4, temperature=5.0, top_p=0.999),
        SamplingParams(seed=5, min_p=0.2),
        SamplingParams(seed=6, repetition_penalty=1.5, frequency_penalty=0.3),
        SamplingParams(temperature=0.0, logit_bias={3: 50.0}),
        SamplingParams(seed=7, min_tokens=9, top_k=vocab + 5),
        SamplingParams(seed=8, logprobs=3, top_k=40, top_p=0.9, min_p=0.01),
    ]
    return [replace(kinds[i % len(kinds)], seed=i) for i in range(count)]


def test_a_row_depends_on_itself_alone() -> None:
    """vllm#22180, vllm#51226: alone, among others, and in another order, every row gives the same token."""
    params, all_logits = mixed_rows(30), logits(30)
    seqs = [sequence(p, seat=i, output=(20,) * (i % 4)) for i, p in enumerate(params)]
    together, logprobs = Sampler(30, V, EOS).draw(all_logits, seqs)
    alone = [Sampler(30, V, EOS).draw(all_logits[i : i + 1], [seqs[i]])[0][0] for i in range(30)]
    assert together == alone
    order = np.random.default_rng(0).permutation(30).tolist()
    permuted, _ = Sampler(30, V, EOS).draw(all_logits[order], [seqs[i] for i in order])
    assert permuted == [together[i] for i in order]
    assert sorted(logprobs) == [i for i, p in enumerate(params) if p.logprobs is not None]


def test_a_row_that_is_no_number_harms_no_other() -> None:
    params = mixed_rows(12)
    clean = logits(12)
    seqs = [sequence(p, seat=i) for i, p in enumerate(params)]
    expected, _ = Sampler(12, V, EOS).draw(clean, seqs)
    for bad in (float("nan"), float("inf")):
        spoiled = clean.clone()
        spoiled[[0, 1, 3, 6, 9], 17] = bad
        spoiled[4] = -torch.inf
        got, _ = Sampler(12, V, EOS).draw(spoiled, seqs)
        assert [got[i] for i in (0, 1, 3, 4, 6, 9)] == [-1] * 6
        assert [got[i] for i in (2, 5, 7, 8, 10, 11)] == [expected[i] for i in (2, 5, 7, 8, 10, 11)]


def test_a_seat_that_changes_hands_keeps_nothing() -> None:
    sampler, row = Sampler(1, V, EOS), logits()
    best = int(row.argmax())
    sampler.draw(
        row, [sequence(SamplingParams(seed=3, top_k=9, min_p=0.1, logit_bias={1: 99.0}, logprobs=2))]
    )
    assert sampler.draw(row, [sequence(SamplingParams(temperature=0.0))]) == ([best], {})


def test_noise_depends_on_seed_and_position_alone() -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    first = gumbel(seeds, np.array([5, 5, 5, 5]), 3)
    assert len(np.unique(first)) == 12 and np.isfinite(first).all()
    assert gumbel(seeds[::-1], np.array([5, 5, 5, 5]), 3).tolist() == first[::-1].tolist()
    assert gumbel(seeds, np.array([5, 5, 5, 5]), 9)[:, :3].tolist() == first.tolist()
    assert gumbel(seeds[:1], np.array([6]), 1)[0, 0] != first[0, 0]


def test_noise_has_the_gumbel_distribution_and_no_pattern() -> None:
    seeds, positions = np.repeat(np.arange(60, dtype=np.uint64), 60), np.tile(np.arange(60), 60)
    grid = gumbel(seeds, positions, 5)
    assert len(np.unique(grid)) == grid.size, (
        "seeds, positions and lanes next to each other must not coincide"
    )
    uniform = np.sort(np.exp(-np.exp(-grid)).ravel())
    assert abs(uniform - np.linspace(0, 1, grid.size)).max() < 2 / math.sqrt(grid.size)
    by_seed = np.exp(-np.exp(-grid)).reshape(60, 60, 5)
    for axis in range(3):
        a, b = (
            np.take(by_seed, range(1, by_seed.shape[axis]), axis),
            np.take(by_seed, range(by_seed.shape[axis] - 1), axis),
        )
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.04


def test_the_last_digits_of_logits_do_not_matter() -> None:
    """Logits of a decode and of the prefill after a crash differ by 5e-5 in float32: tokens must not."""
    width, times = 49_152, 600
    row = logits(width=width)
    # One likely token, and half of the rest spread so thin that a running sum would always be near an edge.
    row[0, 10] = row.logsumexp(-1)
    generator = torch.Generator().manual_seed(5)
    sampler = Sampler(times, width, EOS)
    for sampling in (
        SamplingParams(),
        SamplingParams(top_p=0.95),
        SamplingParams(min_p=1e-3, temperature=1.3),
    ):
        seqs = [sequence(replace(sampling, seed=i), seat=i) for i in range(times)]
        rounded = row + 5e-5 * torch.randn(times, width, generator=generator)
        assert sampler.draw(row.expand(times, -1), seqs) == sampler.draw(rounded, seqs)


def test_same_seed_same_token_and_another_position_another_draw() -> None:
    row = torch.zeros(1, V)
    sampling = SamplingParams(seed=-5)
    assert draw(row, sampling) == draw(row, sampling)
    assert len({draw(row, sampling, output=(20,) * n) for n in range(20)}) > 10
    assert draw(row, sampling, prompt=5) == draw(row, sampling, prompt=3, output=(30, 31)), (
        "not what resuming needs"
    )


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1e-9),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-4),
        SamplingParams(temperature=1e-9, top_k=3, top_p=0.5, min_p=0.5),
    ],
    ids=str,
)
def test_extremes_that_leave_one_token_are_greedy(sampling: SamplingParams) -> None:
    for seed in range(20):
        row = logits(seed=seed)
        assert draw(row, replace(sampling, seed=seed)) == int(row.argmax())


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1e9),
        SamplingParams(temperature=1e9, top_k=V * 10),
        SamplingParams(temperature=1e30, top_p=1.0, top_k=-1),
        SamplingParams(temperature=1e9, top_p=0.9999999),
    ],
    ids=str,
)
def test_great_heat_is_uniform(sampling: SamplingParams) -> None:
    seen = draws(logits(width=8), sampling, 4000)
    counts = np.bincount(seen, minlength=8)
    assert (abs(counts - 500) < 120).all(), counts


def test_logits_of_great_size_are_no_trouble() -> None:
    row = torch.full((1, V), -1e30)
    row[0, 5], row[0, 6] = 1e30, 9.9e29
    assert draw(row, SamplingParams(seed=1)) == 5
    assert draw(row.bfloat16(), SamplingParams(seed=1, temperature=0.7, top_p=0.9)) == 5


def test_equal_logits_are_all_kept_and_greedy_takes_the_first() -> None:
    row = torch.zeros(1, V)
    assert draw(row, SamplingParams(temperature=0.0)) == 0
    assert len(set(draws(row[:, :16], SamplingParams(top_k=2), 400).tolist())) == 16


def test_ids_of_the_padded_vocabulary_are_never_drawn() -> None:
    """vllm#44744"""
    row = logits(width=1024)
    row[0, 990:] = 100.0
    for sampling in (SamplingParams(temperature=0.0), *(SamplingParams(seed=i) for i in range(50))):
        assert draw(row, sampling, vocab=990) < 990
    _, logprobs = Sampler(1, 990, EOS).draw(row, [sequence(SamplingParams(logprobs=5))])
    assert all(token < 990 for token, _ in logprobs[0].top)


def test_min_tokens_bans_every_way_to_end() -> None:
    """vllm#21987: EOS and stop ids, for as long as it takes and no longer."""
    row = torch.zeros(1, V)
    row[0, [7, 8, 9]] = torch.tensor([50.0, 40.0, 30.0])
    sampling = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(8,))
    assert draw(row, sampling) == 9
    assert draw(row, sampling, output=(20,)) == 9
    assert draw(row, sampling, output=(20, 21)) == 7


def test_bias_reaches_every_id_and_bans_with_minus_infinity_do_not_spoil_the_row() -> None:
    row = logits()
    for token in (0, V - 1):
        assert draw(row, SamplingParams(temperature=0.0, logit_bias={token: 100.0})) == token
    best = int(row.argmax())
    for seed in range(10):
        assert draw(row, SamplingParams(seed=seed, top_p=0.9, logit_bias={best: -1e38 * 10})) != best


def test_logprobs_are_those_of_the_model_before_any_change() -> None:
    row = logits()
    values = row[0].log_softmax(-1)
    sampling = SamplingParams(seed=5, temperature=0.3, top_k=4, logit_bias={3: 60.0}, logprobs=4)
    tokens, logprobs = Sampler(1, V, EOS).draw(row, [sequence(sampling)])
    assert tokens == [3]
    assert logprobs[0].token_id == 3
    assert logprobs[0].logprob == pytest.approx(float(values[3]), abs=1e-5)
    best = values.topk(4)
    assert [i for i, _ in logprobs[0].top] == best.indices.tolist()
    assert [p for _, p in logprobs[0].top] == pytest.approx(best.values.tolist(), abs=1e-5)
    _, none = Sampler(1, V, EOS).draw(row, [sequence(SamplingParams(logprobs=0))])
    assert none[0].top == []
    _, many = Sampler(1, V, EOS).draw(row, [sequence(SamplingParams(logprobs=V + 10))])
    assert len(many[0].top) == V


@settings(max_examples=80, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-8, 0.3, 1.0]), min_size=1, max_size=700).filter(
        any
    ),
    seed=st.integers(0, 2**64 - 1),
)
def test_only_a_token_with_weight_is_chosen(weights: list[float], seed: int) -> None:
    noise = gumbel(np.array([seed], np.uint64), np.array([3]), lanes(len(weights)))
    token = int(choose(torch.tensor([weights]), torch.from_numpy(noise)))
    assert token < len(weights) and weights[token] > 0


def test_segments_are_chosen_in_proportion_as_well() -> None:
    weights = torch.zeros(1, 1000)
    weights[0, [3, 255, 256, 700, 999]] = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0])
    noise = gumbel(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, np.int64), lanes(1000))
    counts = np.bincount(choose(weights.expand(20_000, -1), torch.from_numpy(noise)).numpy(), minlength=1000)
    np.testing.assert_allclose(counts[[3, 255, 256, 700, 999]] / 1000, [1, 2, 3, 4, 10], rtol=0.12)
