"""Policies that look at objectives: who must start soon, and who can still be served in time."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf

from plait.engine.config import EngineConfig
from plait.engine.outlook import Outlook
from plait.engine.policies.base import Policy
from plait.engine.policies.fair import Shares
from plait.engine.sequence import Sequence

PATIENCE = 30.0
"""Who asks for nothing is served as if it asked for a start within so many seconds."""


class Slo(Policy):
    """Least slack first: the one whose latest start comes next, by the time model and the predicted length.

    Those that are too late come behind all that are not, in order of arrival.
    """

    late_by = 1e6

    def key(self, seq: Sequence, now: float) -> tuple[float, float]:
        start = self.outlook.latest_start(seq)
        seq.late = now >= start
        if seq.late:
            return seq.timeline.arrived + self.late_by, inf
        return min(start, seq.timeline.arrived + PATIENCE if start == inf else start), start

    def expired(self, seq: Sequence) -> float:
        seq.late = True
        return seq.timeline.arrived + self.late_by

    def yields(self, running: Sequence, waiting: Sequence, now: float) -> bool:
        """One with nothing to lose yields to one that could still make it."""
        return waiting.expires < inf and (running.late or running.expires == inf)


class Default(Policy):
    """Priority, slack and fairness in one number: a moment, the earliest first.

    It starts from the latest start. A level of priority moves it `aging_seconds` back, so that urgent ones come first
    however close to their limit others are, and nobody waits for ever. A second of work moves it `COST` seconds ahead:
    when there is more than can be done, more requests are served in time by leaving out the large ones (Moore 1968).
    One that is too late is put `LATE` seconds behind. Tenants that got more than their share are put up to
    `UNFAIR` seconds behind.
    """

    COST = 20.0
    LATE = 600.0
    UNFAIR = 2.0

    def __init__(self, config: EngineConfig, outlook: Outlook):
        super().__init__(config, outlook)
        self.shares = Shares(config.tenant_weights)
        self.queued, self.unqueued = self.shares.queued, self.shares.unqueued

    def lane(self, seq: Sequence) -> Hashable:
        return seq.tenant

    def key(self, seq: Sequence, now: float) -> tuple[float, float]:
        start, work = self.outlook.latest_start(seq), self.outlook.work(seq)
        moment = start if start < inf else seq.timeline.arrived + PATIENCE
        moment += self.COST * work - seq.priority * self.config.aging_seconds
        seq.late = now >= start
        if seq.late:
            return moment + self.LATE, inf
        return moment, start

    def expired(self, seq: Sequence) -> float:
        seq.late = True
        return seq.key + self.LATE

    def rank(self, seq: Sequence) -> float:
        ahead = self.shares.ahead(seq.tenant)
        return seq.key + ahead if ahead < self.UNFAIR else seq.key + self.UNFAIR

    def yields(self, running: Sequence, waiting: Sequence, now: float) -> bool:
        """A lower priority yields to one that has used up half of its slack; before that a seat may become free."""
        if waiting.late or running.priority >= waiting.priority:
            return False
        arrived = waiting.timeline.arrived
        return waiting.expires == inf or now - arrived >= (waiting.expires - arrived) / 2

    def admitted(self, seq: Sequence) -> None:
        if not seq.charged:
            seq.charged = 1
            self.shares.charge(seq.tenant, self.outlook.work(seq))
