"""How long an iteration takes, from what it computes; fitted while the engine runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from plait.engine.sequence import Chunk


class Load(NamedTuple):
    """What one iteration computes."""

    prefill: int = 0
    """Tokens of prompts."""
    decodes: int = 0
    """Sequences that compute one token."""
    kv: int = 0
    """Tokens whose keys and values the decodes read."""
    pairs: float = 0.0
    """Pairs of a prompt's token and a token before it: attention's work in a prefill grows with its square."""

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Load:
        prefill = decodes = kv = 0
        pairs = 0.0
        for chunk in chunks:
            if chunk.count == 1:
                decodes += 1
                kv += chunk.seq.computed
            else:
                prefill += chunk.count
                pairs += chunk.count * (chunk.seq.computed + chunk.count / 2)
        return cls(prefill, decodes, kv, pairs)


PRIORS = {
    "cpu": (10e-3, 1e-3, 1e-3, 1e-6, 4e-7),
    "cuda": (8e-3, 4e-5, 4e-5, 4e-8, 1e-9),
}
"""Seconds for an iteration, a prompt's token, a decode, a KV token read, a pair: of a 135M model on two cores
(measured), and of an 8B model on a large GPU (its order of magnitude, from bandwidth and arithmetic)."""
FAST, SLOW = 0.995, 0.99995
SLOW_SHARE = 0.02
OUTLIER, OUTLIERS_IN_A_ROW = 4.0, 5
SWEEPS = 3
PULL = 1e-3
"""Weight of the priors beside what was measured."""


class TimeModel:
    """seconds = a + b * prompt tokens + c * decodes + d * KV tokens read + e * pairs, no coefficient below zero.

    Least squares with exponential forgetting, solved by a few sweeps of coordinate descent (projected to zero and
    above) from the last solution; an error counts in relation to the time that the prior expects. Two memories: about
    the last 200 iterations, and with a small weight the last 20,000, so that an hour of decodes does not make it
    forget what a prompt costs. A time more than four times off is left out unless it keeps happening.
    """

    def __init__(self, device: str = "cpu"):
        self.prior = PRIORS.get(device, PRIORS["cuda"])
        n = len(self.prior)
        self.theta = [1.0] * n  # of the prior
        self._fast = [[0.0] * n for _ in range(n)]
        self._slow = [[0.0] * n for _ in range(n)]
        self._fast_sum, self._slow_sum = [0.0] * n, [0.0] * n
        self._strange = 0
        self.observations = 0
        self.error = 0.0
        """Mean of |predicted - measured| / measured over about the last 50 iterations."""

    def predict(self, prefill: float, decodes: float, kv: float, pairs: float = 0.0) -> float:
        """Seconds for an iteration."""
        a, b, c, d, e = self.theta
        u, v, w, x, y = self.prior
        return a * u + b * v * prefill + c * w * decodes + d * x * kv + e * y * pairs

    @property
    def per_prompt_token(self) -> float:
        """Seconds that one more prompt token adds to an iteration; never zero."""
        return max(self.theta[1] * self.prior[1], 1e-9)

    def observe(self, load: Load, seconds: float) -> None:
        """An iteration took so long."""
        if seconds <= 0:
            return
        predicted = self.predict(*load)
        off = abs(predicted - seconds) / seconds
        self.observations += 1
        if self.observations > 10:
            self.error += (min(off, 1.0) - self.error) * (0.02 if self.observations > 60 else 0.1)
            if max(predicted / seconds, seconds / max(predicted, 1e-12)) > OUTLIER:
                self._strange += 1
                if self._strange <= OUTLIERS_IN_A_ROW:
                    return
            else:
                self._strange = 0
        parts = [p * x for p, x in zip(self.prior, (1.0, *load), strict=True)]
        whole = sum(parts)
        self._learn([part / whole for part in parts], seconds / whole)
        self._solve()

    def _learn(self, z: list[float], y: float) -> None:
        for i, zi in enumerate(z):
            fast, slow = self._fast[i], self._slow[i]
            for j, zj in enumerate(z):
                fast[j] = fast[j] * FAST + zi * zj
                slow[j] = slow[j] * SLOW + zi * zj
            self._fast_sum[i] = self._fast_sum[i] * FAST + zi * y
            self._slow_sum[i] = self._slow_sum[i] * SLOW + zi * y

    def _solve(self) -> None:
        theta, known = self.theta, range(len(self.theta))
        for _ in range(SWEEPS):
            for i in known:
                fast, slow = self._fast[i], self._slow[i]
                pull = self._fast_sum[i] + SLOW_SHARE * self._slow_sum[i] + PULL
                for j in known:
                    if j != i:
                        pull -= (fast[j] + SLOW_SHARE * slow[j]) * theta[j]
                theta[i] = max(0.0, pull / (fast[i] + SLOW_SHARE * slow[i] + PULL))
