"""What the engine expects of a sequence: when it must start, and how much work it is."""

from __future__ import annotations

from math import ceil, inf

from plait.engine.lengths import Lengths
from plait.engine.sequence import Sequence
from plait.engine.time_model import Load, TimeModel

CAUTION = 1.2
"""A prediction is stretched by so much before a promise depends on it."""


class Outlook:
    """Predictions from the time model, the lengths seen so far, and what runs now (`decodes`, the last iteration's)."""

    def __init__(self, times: TimeModel, lengths: Lengths, token_budget: int):
        self.times = times
        self.lengths = lengths
        self.token_budget = token_budget
        self.decodes = Load()

    def iteration(self) -> float:
        """Seconds of an iteration that computes what decodes now."""
        return self.times.predict(*self.decodes)

    def prefill(self, tokens: int, computed: int = 0) -> float:
        """Seconds until `tokens` tokens after `computed` ones are computed beside what decodes now."""
        rounds = ceil(tokens / self.token_budget)
        beside = self.times.predict(0, self.decodes.decodes, self.decodes.kv)
        alone = self.times.predict(tokens, 0, 0, tokens * (computed + tokens / 2))
        return alone + rounds * beside - self.times.predict(0, 0, 0)

    def work(self, seq: Sequence) -> float:
        """Seconds of the device's time for the rest of it: its own share, without what an iteration costs anyhow."""
        known, output = len(seq.tokens), self.lengths.remaining(seq)
        reads = output * (known + output / 2)
        left = seq.remaining
        whole = self.times.predict(left, output, reads, left * (seq.computed + left / 2))
        return whole - self.times.predict(0, 0, 0)

    def latest_start(self, seq: Sequence) -> float:
        """The moment after which its first token or all of it would come too late; infinity where nothing is asked."""
        slo, latest = seq.slo, inf
        if slo.first_token is None and slo.deadline is None:
            return latest
        prefill = self.prefill(seq.remaining, seq.computed)
        step = self.iteration()
        if slo.first_token is not None and seq.timeline.first_token is None:
            latest = slo.first_token - CAUTION * (prefill + step)
        if slo.deadline is not None:
            rest = prefill + self.lengths.remaining(seq) * step
            latest = min(latest, slo.deadline - CAUTION * rest)
        return latest
