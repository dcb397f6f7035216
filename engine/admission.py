"""Whom to refuse: requests whose objectives cannot be met, by a forecast when they come, and for as long as they wait.

What was not refused and cannot be served in time any more never reaches the device.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from plait.engine.api import RequestRefused
from plait.engine.forecast import Forecast, Forecaster
from plait.engine.scheduler import Scheduler
from plait.engine.sequence import Sequence, Status

WARM = 50
"""Iterations that the time model must have seen before a forecast refuses anybody."""
SURE = 3.0
"""A newcomer is refused when its forecast is so many times over. To refuse one in error costs an answer; to let one in
that waits in vain costs nothing, for it is given up before it reaches the device."""
OVER = "the time is over"
RETRY = (0.1, 600.0)
"""The shortest and the longest `retry_after`, seconds."""


class Admission:
    """Refuses new sequences, and says which of those in the engine are to be ended.

    Without `predicts`, only what is certain counts: a deadline that has passed.
    """

    def __init__(self, scheduler: Scheduler, predicts: bool):
        self.scheduler = scheduler
        self.predicts = predicts
        self.forecaster = Forecaster(scheduler)
        self.refused: Counter[str] = Counter()
        """By the objective that could not be met."""
        self.error = 0.0
        """Mean of |forecast - actual| seconds to the first token, over about the last 50 requests with objectives."""
        self._moments: list[tuple[float, int, Sequence]] = []
        self._numbers = count()

    def check(self, seq: Sequence, now: float) -> None:
        """Before a sequence is added. Raises RequestRefused when it will probably miss an objective, or has missed its
        deadline, and need not be served late."""
        slo = seq.slo
        asks = slo.first_token is not None or slo.per_token is not None or slo.deadline is not None
        if slo.deadline is not None and now >= slo.deadline and not slo.serve_late:
            raise RequestRefused("deadline_exceeded", "slo.deadline_ms", OVER)
        if self.predicts and self.forecaster.observations >= WARM and not seq.output_len:
            if asks:
                forecast = self.forecaster.forecast(seq, now)
                if not slo.serve_late:
                    self._judge(seq, forecast, now)
                seq.expected = now + forecast.first_token
            self.forecaster.came(seq, now)
        if asks and not slo.serve_late:
            self._watch(seq)

    def overdue(self, now: float) -> list[Sequence]:
        """Sequences to be ended before anything else runs; their code and message are set."""
        over = []
        while self._moments and self._moments[0][0] <= now:
            seq = heappop(self._moments)[2]
            if seq.status is Status.FINISHED or seq.code is not None:
                continue
            slo = seq.slo
            if slo.deadline is not None and now >= slo.deadline:
                seq.code, seq.message = "deadline_exceeded", f"slo.deadline_ms: {OVER}"
            elif seq.status is Status.WAITING and not seq.output_len:
                self._give_up(seq, now)
            if seq.code is not None:
                over.append(seq)
        return over

    def began(self, seq: Sequence, now: float) -> None:
        """A sequence got its first token."""
        if seq.expected is not None:
            self.error += (abs(now - seq.expected) - self.error) * 0.02
            seq.expected = None

    def _judge(self, seq: Sequence, f: Forecast, now: float) -> None:
        slo = seq.slo
        if slo.first_token is not None:
            left = slo.first_token - now
            if f.first_token > SURE * left or f.first_token_alone > left:
                self._refuse("slo.ttft_ms", "first token", f.first_token, left, f.first_token_alone <= left)
        if slo.per_token is not None and f.per_token > slo.per_token:
            possible = f.per_token_alone <= slo.per_token
            self._refuse("slo.tpot_ms", "time per token", f.per_token, slo.per_token, possible)
        if slo.deadline is not None:
            left = slo.deadline - now
            alone = f.first_token_alone + (f.completion - f.first_token)
            if f.completion > SURE * left or alone > left:
                self._refuse("slo.deadline_ms", "last token", f.completion, left, alone <= left)

    def _refuse(self, field: str, what: str, predicted: float, left: float, possible: bool) -> None:
        self.refused[field] += 1
        message = f"the {what} would come to {predicted * 1000:.0f} ms, and {max(left, 0) * 1000:.0f} ms were asked for"
        if not possible:
            message += "; this worker cannot do that even when idle"
        raise RequestRefused("overloaded", field, message, retry_after(predicted - left) if possible else inf)

    def _watch(self, seq: Sequence) -> None:
        slo = seq.slo
        moments = [slo.deadline] if slo.deadline is not None else []
        if self.predicts and slo.first_token is not None and not seq.output_len:
            warm = self.forecaster.observations >= WARM
            moments.append(slo.first_token - (self.forecaster.alone(seq) if warm else 0.0))
        for moment in moments:
            heappush(self._moments, (moment, next(self._numbers), seq))
        in_flight = len(self.scheduler.running) + len(self.scheduler.waiting)
        if len(self._moments) > 64 and len(self._moments) > 4 * in_flight:
            self._moments = [entry for entry in self._moments if entry[2].status is not Status.FINISHED]
            heapify(self._moments)

    def _give_up(self, seq: Sequence, now: float) -> None:
        """It waits, and even if it ran at once its first token would be late."""
        allowed = seq.slo.first_token - seq.timeline.arrived
        predicted = self.forecaster.forecast(seq, now).first_token
        seq.code, seq.retry_after = "overloaded", retry_after(predicted - allowed)
        waited = (now - seq.timeline.arrived) * 1000
        seq.message = (
            f"slo.ttft_ms: after {waited:.0f} of {allowed * 1000:.0f} ms it still waits for its turn"
        )
        self.refused["slo.ttft_ms"] += 1


def make_admission(scheduler: Scheduler) -> Admission:
    """As the scheduler's configuration says; `auto` is `predict` for the policies that look at objectives."""
    wanted = scheduler.config.admission
    predicts = wanted == "predict" or (wanted == "auto" and scheduler.config.policy in ("default", "slo"))
    return Admission(scheduler, predicts)


def retry_after(seconds: float) -> float:
    """A hint within its bounds."""
    return min(max(seconds, RETRY[0]), RETRY[1])
