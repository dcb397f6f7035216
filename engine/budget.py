"""What an iteration may take on, so that those that decode keep their time per token."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from plait.engine.sequence import Sequence
from plait.engine.time_model import Load, TimeModel

HASTE = 0.8
"""Share of the slack that is planned for."""
LOST = 20
"""So many tokens late, a sequence is not expected to catch up, and nobody waits for it."""
MAX_SKIPS = 3
"""Iterations in a row that may go by without a decode."""


class Pace:
    """The adaptive token budget: an iteration should end before the first of its decodes is late.

    An objective is an average since the first token, so a sequence that was served faster than it asked for can wait
    through a larger prompt, or through an iteration without it. `floor` prompt tokens are always allowed, or decodes
    could keep prompts out for ever (sglang#34554, mlxcel#1013).
    """

    def __init__(self, times: TimeModel, floor: int):
        self.times = times
        self.floor = floor
        self.limit = inf

    def leave_out(
        self, decoding: list[Sequence], now: float, must: Callable[[Sequence], bool]
    ) -> set[Sequence]:
        """Decodes that this iteration goes without, those with the most slack, so that it ends in time for the others.

        Sets `limit`, the seconds the iteration may take. None is left out for which `must` holds.
        """
        tightest, self.limit = inf, inf
        for seq in decoding:
            # As _slack, without the call: there may be hundreds in every iteration.
            if (per_token := seq.slo.per_token) is None or (first := seq.timeline.first_token) is None:
                continue
            left = first + per_token * (len(seq.tokens) - seq.prompt_len) - now
            if -LOST * per_token < left < tightest:
                tightest = left
                # Late already: half the time that was asked for, to catch up.
                self.limit = HASTE * max(left, per_token / 2)
        if tightest == inf:
            return set()
        kv = sum(seq.computed for seq in decoding)
        excess = self.times.predict(0, len(decoding), kv) - self.limit
        if excess <= 0:
            return set()
        fixed = self.times.predict(0, 0, 0)
        left_out: set[Sequence] = set()
        for seq in sorted(decoding, key=lambda s: _slack(s, now), reverse=True):
            if excess <= 0:
                break
            if seq.skipped < MAX_SKIPS and _slack(seq, now) > self.limit / HASTE and not must(seq):
                left_out.add(seq)
                excess -= self.times.predict(0, 1, seq.computed) - fixed
        return left_out

    def prompt_tokens(self, load: Load) -> float:
        """Prompt tokens that fit beside these decodes."""
        if self.limit == inf:
            return inf
        spare = self.limit - self.times.predict(0, load.decodes, load.kv)
        return max(self.floor, spare / self.times.per_prompt_token)


def _slack(seq: Sequence, now: float) -> float:
    """Seconds until its next token is due; infinity where nothing was asked or nothing can be saved."""
    per_token, first = seq.slo.per_token, seq.timeline.first_token
    if per_token is None or first is None:
        return inf
    left: float = first + per_token * (len(seq.tokens) - seq.prompt_len) - now
    return left if left > -LOST * per_token else inf
