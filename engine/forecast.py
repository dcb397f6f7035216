"""When a sequence that comes now would get its tokens.

A fluid model: the work of those that rank before it, at the speed of the iteration-time model, beside what decodes; a
seat or memory that it has to wait for becomes free as answers come to their ends; more urgent work that keeps
arriving makes the wait longer by the share of the device that it takes (Cobham, Operations Research 2(1), 1954).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, exp, inf

from plait.engine.budget import HASTE
from plait.engine.lengths import UNKNOWN
from plait.engine.scheduler import Scheduler
from plait.engine.sequence import Sequence

LOOKS = 128
"""Waiting sequences that are looked at for one prediction; of more, each stands for its neighbours."""
MEMORY = 30.0
"""Seconds over which the load by priority is averaged."""
MOST = 0.5
"""Share of the device that more urgent work is believed to take at most."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now: to the first token, from one to the next, to the last; and the first two were nobody else
    there."""

    first_token: float
    per_token: float
    completion: float
    first_token_alone: float
    per_token_alone: float


class Arrivals:
    """Seconds of the device's time that arrive in a second, by priority: an exponential average."""

    def __init__(self) -> None:
        self._load = [0.0] * 10
        self._at = 0.0

    def add(self, priority: int, work: float, now: float) -> None:
        fade = exp((self._at - now) / MEMORY)
        self._load = [load * fade for load in self._load]
        self._load[priority] += work / MEMORY
        self._at = now

    def above(self, priority: int, now: float) -> float:
        """Share of the device that more urgent requests take."""
        return min(MOST, sum(self._load[priority + 1 :]) * exp((self._at - now) / MEMORY))


class Forecaster:
    """Predicts from a scheduler's queue, which it only reads."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.arrivals = Arrivals()
        self.overtaking = scheduler.config.policy in ("default", "priority")

    @property
    def observations(self) -> int:
        """Iterations that the time model has seen."""
        return self.scheduler.times.observations

    def came(self, seq: Sequence, now: float) -> None:
        """It was let in."""
        self.arrivals.add(min(max(seq.priority, 0), 9), self.scheduler.outlook.work(seq), now)

    def forecast(self, seq: Sequence, now: float) -> Forecast:
        """For one that does not wait yet. Looks at LOOKS that wait and at all that run."""
        s, times = self.scheduler, self.scheduler.times
        load, size = s.outlook.decodes, s.kv.blocks
        own = seq.remaining
        tokens, pairs, places, blocks = 0.0, 0.0, 1.0, float(size.needed(0, len(seq.tokens)))
        for other, weight in self._before(seq, now):
            left = other.remaining
            tokens += weight * left
            pairs += weight * left * (other.computed + left / 2)
            places += weight
            blocks += weight * size.needed(0, len(other.tokens))
        tightest = inf
        for other in s.running:
            if other.remaining > 1:
                tokens += other.remaining
                pairs += other.remaining * (other.computed + other.remaining / 2)
            elif other.slo.per_token is not None:
                tightest = min(tightest, other.slo.per_token)
        # Half of those before it decode beside it, on average over the wait.
        decodes, kv = load.decodes + places / 2, load.kv + tokens / 2
        step = times.predict(0, decodes, kv)
        room = min(s.token_budget - decodes, (HASTE * tightest - step) / times.per_prompt_token)
        rounds = ceil((tokens + own) / max(s.pace.floor, room))
        work = times.predict(tokens + own, 0, 0, pairs + own * own / 2) - times.predict(0, 0, 0)
        alone = self.alone(seq)
        first = max(alone, work + rounds * step, alone + self._places(seq, places, blocks, now) * step)
        share = self.arrivals.above(seq.priority, now) if self.overtaking else 0.0
        first = alone + (first - alone) / (1 - share)
        pace = times.predict(0, load.decodes + 1, load.kv + own)
        rest = s.lengths.remaining(seq) * pace
        return Forecast(first, pace, first + rest, alone, times.predict(0, 1, own))

    def alone(self, seq: Sequence) -> float:
        """Seconds to the first token on an idle engine."""
        times, left = self.scheduler.times, seq.remaining
        whole = times.predict(left, 0, 0, left * (seq.computed + left / 2))
        return whole + (ceil(left / self.scheduler.token_budget) - 1) * times.predict(0, 0, 0)

    def _before(self, seq: Sequence, now: float) -> Iterator[tuple[Sequence, int]]:
        """Those that wait and rank before it, each with how many it stands for."""
        policy = self.scheduler.policy
        seq.key, seq.expires = policy.key(seq, now)
        mine = policy.rank(seq)
        some, weight = self.scheduler.waiting.sample(LOOKS)
        return ((other, weight) for other in some if policy.rank(other) <= mine)

    def _places(self, seq: Sequence, places: float, blocks: float, now: float) -> float:
        """Iterations until answers have ended, or yielded, whose seats and memory it needs."""
        s = self.scheduler
        if places <= len(s.seats) and blocks + s.reserve <= s.kv.blocks.available:
            return 0.0
        when = now if seq.expires == inf else max(now, seq.expires - 1e-3)
        yielding = [other for other in s.running if s.policy.yields(other, seq, when)]
        places -= len(s.seats) + len(yielding)
        blocks -= s.kv.blocks.available - s.reserve + sum(len(other.blocks) for other in yielding)
        held = sum(len(other.blocks) for other in s.running) / max(1, len(s.running))
        ends = max(places, blocks / max(1.0, held), 0.0)
        typical = s.lengths.all.beyond(0, 0.5) or UNKNOWN
        return ends * typical / max(1, len(s.running))
