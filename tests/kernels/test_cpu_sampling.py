"""The compiled sampling against torch: the largest, and the token that the filters and the noise leave."""

import math

import numpy as np
import pytest
import torch

from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.noise import gumbel
from plait.engine.sampler import Sampler, argmax, lanes
from plait.engine.sequence import Sequence
from plait.kernels import cpu


@pytest.mark.parametrize("width", [1, 15, 16, 17, 1000])
def test_argmax(width):
    x = torch.randn(9, width)
    x[1] = 0.0
    x[2, width // 2] = math.nan
    x[3, width - 1] = math.inf
    x[4] = -math.inf
    x[5, width // 2 :] = 5.0
    x[6, 0] = -math.inf
    assert cpu.argmax(x).tolist() == argmax(x).tolist()
    assert cpu.argmax(x)[1] == 0 and cpu.argmax(x)[5] == width // 2, "the first of equals"
    wide = torch.randn(5, 2 * width)
    assert cpu.argmax(wide[:, :width]).tolist() == argmax(wide[:, :width]).tolist()


PARAMS = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t in (0.01, 0.7, 3.0)
    for k in (0, 1, 40, 10**6)
    for p in (1.0, 0.9, 0.3, 1e-6)
    for m in (0.0, 0.1)
]


@pytest.mark.parametrize("width", [50, 256, 1000, 4099])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_draws_equal_the_torch_path(width, spread):
    rows = len(PARAMS)
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * spread
    # Ties, as half types bring them, and tokens that may not be drawn.
    x = (x * 8).round() / 8
    x[:, ::7] = -math.inf
    seqs = []
    for i, params in enumerate(PARAMS):
        request = GenerationRequest(str(i), [1], SamplingParams(seed=i, **params))
        seqs.append(Sequence.of(request, 0.0))
        seqs[-1].seat = i
    sampler = Sampler(rows, width, frozenset())
    got, _ = sampler.draw(x, seqs)
    seats, every = np.arange(rows), np.arange(rows)
    noise = gumbel(sampler.seeds, np.ones(rows, dtype=np.int64), lanes(width))
    want = sampler._random(x, every, seats, noise)[1].tolist()
    # Sums are added up in another order: a nucleus may end one token earlier or later, rarely.
    assert sum(a != b for a, b in zip(got, want, strict=True)) <= 1
    assert all(token % 7 for token in got)


def test_a_broken_row_is_named_and_harms_no_other():
    x = torch.randn(3, 300)
    x[1, 7] = math.nan
    seqs = [Sequence.of(GenerationRequest(str(i), [1], SamplingParams(seed=i)), 0.0) for i in range(3)]
    for i, seq in enumerate(seqs):
        seq.seat = i
    tokens, _ = Sampler(3, 300, frozenset()).draw(x, seqs)
    assert tokens[1] == -1 and tokens[0] >= 0 and tokens[2] >= 0
