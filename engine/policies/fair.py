"""Weighted fairness among tenants: a virtual token counter each (VTC, arXiv:2401.00588)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from plait.engine.config import EngineConfig
from plait.engine.outlook import Outlook
from plait.engine.policies.base import Policy
from plait.engine.sequence import Chunk, Sequence

INPUT, OUTPUT = 1.0, 2.0
"""What a token of a prompt and one of an answer count, as in the paper."""


class Shares:
    """Service per tenant, divided by its weight.

    A tenant that begins to wait is lifted to the least counter of those that wait (or, if nobody does, of the one
    that waited last): nobody saves up credit while it asks for nothing.
    """

    def __init__(self, weights: dict[str, float]):
        self.weights = weights
        self.counters: dict[str, float] = {}
        self.waiting: Counter[str] = Counter()
        self._last = ""
        self._least: float | None = None

    def queued(self, seq: Sequence) -> None:
        tenant = seq.tenant
        if tenant not in self.counters:
            self.counters[tenant] = self.least()
        elif not self.waiting[tenant] and not seq.preemptions:
            self.counters[tenant] = max(self.counters[tenant], self.least())
        self.waiting[tenant] += 1
        self._least = None

    def unqueued(self, seq: Sequence) -> None:
        tenant = seq.tenant
        self.waiting[tenant] -= 1
        self._least = None
        if not self.waiting[tenant]:
            del self.waiting[tenant]
            self._last = tenant
            if not self.waiting:
                # Whoever comes next is lifted to here: lower counters say nothing any more.
                least = self.counters[tenant]
                self.counters = {t: c for t, c in self.counters.items() if c > least or t == tenant}

    def charge(self, tenant: str, service: float) -> None:
        counter = self.counters[tenant] if tenant in self.counters else self.least()
        self.counters[tenant] = counter + service / self.weights.get(tenant, 1.0)
        self._least = None

    def least(self) -> float:
        """The smallest counter of those that wait, or that of the last one that did."""
        if self._least is None:
            counters = [self.counters[tenant] for tenant in self.waiting]
            self._least = min(counters, default=self.counters.get(self._last, 0.0))
        return self._least

    def ahead(self, tenant: str) -> float:
        """How much more than the least served of those that wait; zero for one that got less."""
        least = self.least() if self._least is None else self._least
        counter = self.counters.get(tenant, 0.0)
        return counter - least if counter > least else 0.0


class Fair(Policy):
    """The tenant that got least comes next, its earliest request first.

    Between two tenants that both have requests waiting all the time, the difference in service (prompt tokens plus
    twice the output tokens, divided by weight) is at most twice max(longest prompt, 2 * tokens the pool holds), divided
    by the smaller weight (theorem 4.4 of the paper).
    """

    def __init__(self, config: EngineConfig, outlook: Outlook):
        super().__init__(config, outlook)
        self.shares = Shares(config.tenant_weights)
        self.queued, self.unqueued = self.shares.queued, self.shares.unqueued

    def lane(self, seq: Sequence) -> Hashable:
        return seq.tenant

    def rank(self, seq: Sequence) -> float:
        return self.shares.counters.get(seq.tenant, 0.0)

    def admitted(self, seq: Sequence) -> None:
        """The prompt is charged at once, and what is computed again is not."""
        if not seq.charged:
            seq.charged = seq.prompt_len
            self.shares.charge(seq.tenant, INPUT * seq.prompt_len)

    def advanced(self, chunks: Iterable[Chunk]) -> None:
        drawn = Counter(chunk.seq.tenant for chunk in chunks if chunk.seq.remaining == 0)
        for tenant, count in drawn.items():
            self.shares.charge(tenant, OUTPUT * count)
