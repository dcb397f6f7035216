"""How many prompt tokens an iteration may compute, so that those that decode keep their time per token."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from plait.engine.sequence import Sequence
from plait.engine.time_model import Load, TimeModel

HASTE = 0.8
"""Share of the slack that is planned for."""


def slack(seq: Sequence, now: float) -> float:
    """Seconds until its next token is due, by the average that was asked for since its first one."""
    slo, first = seq.slo, seq.timeline.first_token
    if slo.per_token is None or first is None:
        return inf
    return first + slo.per_token * seq.output_len - now


class Pace:
    """The adaptive token budget: an iteration should end before the first of its decodes is late.

    An objective is an average, so one that has been served faster than it asked for can wait through a larger prompt.
    One that is so late that it cannot catch up is not waited for. `floor` prompt tokens are always allowed, or
    decodes could keep prompts out for ever (sglang#34554).
    """

    def __init__(self, times: TimeModel, floor: int):
        self.times = times
        self.floor = floor

    def prompt_tokens(self, decoding: Iterable[Sequence], load: Load, now: float) -> float:
        """Prompt tokens that fit beside these decodes."""
        tightest = inf
        for seq in decoding:
            per_token = seq.slo.per_token
            if per_token is not None and seq.timeline.first_token is not None:
                left = seq.timeline.first_token + per_token * seq.output_len - now
                if left < tightest and left > -LOST * per_token:
                    tightest = left
        if tightest == inf:
            return inf
        spare = HASTE * tightest - self.times.predict(0, load.decodes, load.kv)
        return max(self.floor, spare / self.times.per_prompt_token)


LOST = 20
"""So many tokens late, it is not expected to catch up."""
