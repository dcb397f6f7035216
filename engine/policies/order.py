"""Policies that order by one number which a sequence brings along."""

from __future__ import annotations

from math import inf

from plait.engine.policies.base import Policy
from plait.engine.sequence import Sequence


class Priority(Policy):
    """The more urgent first, 9 before 0, with aging: `aging_seconds` of waiting count as much as one level.

    Compared with one another at any moment, two waiting sequences have both grown older by the same amount, so
    that the order of priority plus age never changes: it is that of the arrival moved back by the priority.
    """

    def key(self, seq: Sequence, now: float) -> tuple[float, float]:
        return seq.timeline.arrived - seq.priority * self.config.aging_seconds, inf

    def yields(self, running: Sequence, waiting: Sequence, now: float) -> bool:
        return running.priority < waiting.priority and running.key > waiting.key


class Spt(Policy):
    """Shortest remaining work first, in seconds of the device; output lengths are predicted (`lengths.py`).

    It has the least mean latency of all orders when predictions are right (Smith 1956), and long ones wait.
    """

    def key(self, seq: Sequence, now: float) -> tuple[float, float]:
        return self.outlook.work(seq), inf
