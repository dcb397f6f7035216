"""Draws one token per row. A row's result depends on that row alone, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from plait.engine.api import TokenLogprob
from plait.engine.noise import gumbel
from plait.engine.sequence import Sequence
from plait.engine.staging import Staging
from plait.kernels import cpu

GREEDY_BELOW = 1e-5
SEGMENT = 256


class Sampler:
    """Sampling parameters by seat, in arrays, so that a batch is drawn with few operations for all rows."""

    def __init__(self, max_running: int, vocab_size: int, eos: frozenset[int]):
        self.vocab_size = vocab_size
        self.eos = eos
        self.owners: list[Sequence | None] = [None] * max_running
        self.temperature = np.zeros(max_running, np.float32)
        self.top_p = np.ones(max_running, np.float32)
        self.top_k = np.zeros(max_running, np.int64)
        self.min_p = np.zeros(max_running, np.float32)
        self.seeds = np.zeros(max_running, np.uint64)
        self.adjusted = np.zeros(max_running, bool)
        self.logprobs = np.zeros(max_running, bool)
        self.staging: Staging | None = None

    def _seat(self, seq: Sequence) -> int:
        if self.owners[seq.seat] is not seq:
            s, i = seq.sampling, seq.seat
            self.owners[i] = seq
            self.temperature[i], self.top_p[i], self.min_p[i] = s.temperature, s.top_p, s.min_p
            self.top_k[i] = max(0, s.top_k) if s.top_k < self.vocab_size else 0
            self.seeds[i] = np.uint64(s.seed & (2**64 - 1))
            self.adjusted[i] = bool(
                s.logit_bias
                or s.min_tokens
                or s.presence_penalty
                or s.frequency_penalty
                or s.repetition_penalty != 1.0
            )
            self.logprobs[i] = s.logprobs is not None
        return seq.seat

    def draw(self, logits: Tensor, seqs: list[Sequence]) -> tuple[list[int], dict[int, TokenLogprob]]:
        """Tokens for the rows of logits [R, >= vocab], -1 where a row is not a number; log-probabilities by row."""
        # Ids past the vocabulary are padding of the output matrix: no text has them.
        logits = logits[:, : self.vocab_size]
        seats = np.array([self._seat(s) for s in seqs])
        asked = np.flatnonzero(self.logprobs[seats])
        raw = {int(i): logits[i].float() for i in asked}
        if (changed := np.flatnonzero(self.adjusted[seats])).size:
            logits = logits.float().clone()
            for i in changed:
                adjust(logits[i], seqs[i], self.eos)
        compiled = logits.device.type == "cpu" and cpu.library() is not None
        if compiled:
            logits = logits.float()
        tokens = cpu.argmax(logits) if compiled else argmax(logits)
        hot = np.flatnonzero(self.temperature[seats] >= GREEDY_BELOW)
        if hot.size:
            # A GPU still computes the logits while its host makes the noise.
            positions = np.array([len(seqs[i].tokens) for i in hot])
            noise = gumbel(self.seeds[seats[hot]], positions, lanes(logits.shape[1]))
            draw = self._draw if compiled else self._random
            rows, chosen = draw(logits, hot, seats[hot], noise)
            tokens[rows] = torch.where(tokens[rows] < 0, -1, chosen)
        drawn = tokens.tolist()
        return drawn, {i: logprob(row, drawn[i], seqs[i].sampling.logprobs or 0) for i, row in raw.items()}

    def _draw(
        self, logits: Tensor, rows: np.ndarray, seats: np.ndarray, noise: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        columns = (self.temperature[seats], self.top_k[seats], self.top_p[seats], self.min_p[seats], noise)
        at = torch.from_numpy(rows)
        return at, cpu.draw(logits, at, *map(torch.from_numpy, columns))

    def _random(
        self, logits: Tensor, rows: np.ndarray, seats: np.ndarray, noise: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """The rows, and a token for each, on the device of the logits; only nucleus sampling waits for it."""
        if self.staging is None:
            self.staging = Staging(logits.device)
        k, p, m = self.top_k[seats], self.top_p[seats], self.min_p[seats]
        cuts = [np.flatnonzero(x) for x in (k, p < 1, m)]
        limits = [values[cut, None] for values, cut in zip((k, p, m), cuts, strict=True)]
        limits[2] = np.log(limits[2])
        sent = self.staging.sent(rows, noise, self.temperature[seats, None], *cuts, *limits)
        at, noise_, temperature, with_k, with_p, with_m, ks, ps, ms = sent
        x = logits[at].float() / temperature
        x -= x.max(dim=-1, keepdim=True).values
        if len(with_k):
            x[with_k] = keep_top_k(x[with_k], ks, int(k.max()))
        if len(with_p):
            x[with_p] = keep_top_p(x[with_p], ps)
        if len(with_m):
            x[with_m] = keep_above(x[with_m], ms)
        return at, choose(x.exp_(), noise_)


def argmax(logits: Tensor) -> Tensor:
    best = logits.max(dim=-1)
    return torch.where(torch.isfinite(best.values), best.indices, -1)


def adjust(row: Tensor, seq: Sequence, eos: frozenset[int]) -> None:
    """Bias, the ban on ending early, and penalties (vLLM's order and formulas) on float32 logits [V], in place."""
    s = seq.sampling
    if s.logit_bias:
        row[list(s.logit_bias)] += torch.tensor(list(s.logit_bias.values()), device=row.device)
    if seq.output_len < s.min_tokens and (banned := [i for i in {*eos, *s.stop_token_ids} if i < len(row)]):
        row[banned] = -torch.inf
    if s.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(seq.tokens)), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if seq.output_len and (s.presence_penalty or s.frequency_penalty):
        output = torch.tensor(seq.tokens[seq.prompt_len :], device=row.device)
        ids, counts = output.unique(return_counts=True)
        row[ids] -= s.presence_penalty + s.frequency_penalty * counts


def keep_above(x: Tensor, threshold: Tensor) -> Tensor:
    """Logits under a row's threshold become -inf. Ties with it stay, so that no order among equals matters."""
    return x.masked_fill(x < threshold, -torch.inf)


def keep_top_k(x: Tensor, k: Tensor, largest: int) -> Tensor:
    best = x.topk(largest, dim=-1).values
    return keep_above(x, best.gather(1, k - 1))


def keep_top_p(x: Tensor, p: Tensor) -> Tensor:
    """Nucleus sampling (Holtzman et al., ICLR 2020): the likeliest tokens that together reach p."""
    total = x.exp().sum(-1, keepdim=True, dtype=torch.float64)
    # A full sort of the vocabulary is far dearer than a look at its head, which nearly always holds the nucleus.
    width = min(512, x.shape[1])
    while True:
        best = x.topk(width, dim=-1).values
        mass = best.exp().cumsum(-1, dtype=torch.float64) / total
        if width == x.shape[1] or bool((mass[:, -1:] >= p).all()):
            break
        width = min(width * 8, x.shape[1])
    last = (mass < p).sum(-1, keepdim=True).clamp(max=width - 1)
    return keep_above(x, best.gather(1, last))


def choose(weights: Tensor, noise: Tensor) -> Tensor:
    """One token of each row of weights [R, V] (float32), in proportion to them, by Gumbel noise [R, `lanes(V)`].

    The largest of log weight + noise wins (Gumbel-max; Maddison et al., NeurIPS 2014): first among segments of the
    vocabulary, then in the one that won. Unlike where a running sum passes a number, this hardly ever changes when
    weights change in their last digits, as they do with the batch they are computed in.
    """
    rows, width = weights.shape
    if pad := -width % SEGMENT:
        weights = torch.nn.functional.pad(weights, (0, pad))
    parts = weights.view(rows, -1, SEGMENT)
    sums = parts.sum(-1).double()
    segment = (sums.log() + noise[:, SEGMENT:]).argmax(-1, keepdim=True)
    inside = parts.gather(1, segment[..., None].expand(-1, 1, SEGMENT))[:, 0]
    token = (inside.double().log() + noise[:, :SEGMENT]).argmax(-1, keepdim=True)
    return (segment * SEGMENT + token)[:, 0]


def lanes(width: int) -> int:
    """How much noise a row of `width` weights takes."""
    return SEGMENT + -(-width // SEGMENT)


def logprob(row: Tensor, token: int, top: int) -> TokenLogprob:
    """Log-probabilities of the model itself, before penalties and temperature."""
    values = row.log_softmax(-1)
    best = values.topk(min(top, len(row))) if top else None
    pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best else []
    return TokenLogprob(token, float(values[token]) if token >= 0 else float("nan"), pairs)
