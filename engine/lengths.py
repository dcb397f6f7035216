"""How long an answer will be: quantiles of what its tenant's answers were."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque

from plait.engine.sequence import Sequence

WINDOW, TENANTS = 200, 1000
UNKNOWN = 256
"""Tokens expected of the first answers."""


class Recent:
    """The last lengths, in order of arrival and sorted."""

    __slots__ = ("order", "ranked")

    def __init__(self) -> None:
        self.order: deque[int] = deque()
        self.ranked: list[int] = []

    def add(self, length: int) -> None:
        if len(self.order) == WINDOW:
            del self.ranked[bisect_right(self.ranked, self.order.popleft()) - 1]
        self.order.append(length)
        insort(self.ranked, length)

    def beyond(self, produced: int, quantile: float) -> int | None:
        """The quantile of those longer than `produced`; None when there is none."""
        at = bisect_right(self.ranked, produced)
        longer = len(self.ranked) - at
        return self.ranked[at + int(longer * quantile)] if longer else None


class Lengths:
    """Online quantiles over each tenant's last 200 answers, and over everybody's where a tenant has few."""

    def __init__(self, quantile: float = 0.5):
        self.quantile = quantile
        self.all = Recent()
        self.tenants: OrderedDict[str, Recent] = OrderedDict()

    def ended(self, seq: Sequence) -> None:
        """An answer came to its own end."""
        self.all.add(seq.output_len)
        recent = self.tenants.setdefault(seq.tenant, Recent())
        self.tenants.move_to_end(seq.tenant)
        recent.add(seq.output_len)
        if len(self.tenants) > TENANTS:
            self.tenants.popitem(last=False)

    def remaining(self, seq: Sequence) -> int:
        """Output tokens still to come, at least 1 and at most what `max_tokens` leaves."""
        produced, limit = seq.output_len, seq.sampling.max_tokens
        recent = self.tenants.get(seq.tenant)
        known = recent if recent is not None and len(recent.order) >= 10 else self.all
        total = known.beyond(produced, self.quantile)
        if total is None:
            total = max(UNKNOWN, 2 * produced)
        total = total if limit is None else min(total, limit)
        return max(1, total - produced)
