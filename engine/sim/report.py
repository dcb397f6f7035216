"""What became of the requests of a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from plait.engine.sim.worker import Answer


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one class of requests, or of all. Seconds, of those that got so far; None where none did."""

    requests: int
    slo_attainment: float
    """Share of the requests that met all their objectives; those that were refused did not."""
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    latency_p50: float | None
    latency_p99: float | None
    preemptions: int
    refused: int
    """With `overloaded`, before any of their tokens."""
    expired: int
    """Ended at their deadline, with `deadline_exceeded`."""
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """`goodput` counts requests that met all their objectives, per second from the first arrival to the last end."""

    overall: Summary
    classes: dict[str, Summary]
    goodput: float
    seconds: float
    iterations: int
    utilization: float
    """Share of the time in which a device computed."""

    def flat(self) -> dict[str, object]:
        """One object, for JSON: what is said of all requests lies on top."""
        fields = asdict(self)
        return {**fields.pop("overall"), **fields}


def met(answer: Answer) -> bool:
    """Whether every objective was met."""
    seq = answer.seq
    if seq is None or answer.code is not None or seq.reason not in ("stop", "length"):
        return False
    slo, times = seq.slo, seq.timeline
    pace = tpot(answer)
    return (
        (slo.first_token is None or times.first_token <= slo.first_token)
        and (slo.per_token is None or pace is None or pace <= slo.per_token)
        and (slo.deadline is None or times.finished <= slo.deadline)
    )


def ttft(answer: Answer) -> float | None:
    times = answer.seq.timeline if answer.seq else None
    return times.first_token - times.arrived if times and times.first_token is not None else None


def tpot(answer: Answer) -> float | None:
    """Mean seconds per token after the first; None when there is no second one."""
    seq = answer.seq
    if seq is None or answer.code is not None or seq.timeline.first_token is None or seq.output_len < 2:
        return None
    return (seq.timeline.finished - seq.timeline.first_token) / (seq.output_len - 1)


def latency(answer: Answer) -> float | None:
    seq = answer.seq
    return seq.timeline.finished - seq.timeline.arrived if seq and answer.code is None else None


def summarize(answers: list[Answer]) -> Summary:
    def at(share: float, measure: Callable[[Answer], float | None]) -> float | None:
        values = sorted(value for a in answers if (value := measure(a)) is not None)
        return values[max(0, math.ceil(share * len(values)) - 1)] if values else None

    return Summary(
        requests=len(answers),
        slo_attainment=sum(map(met, answers)) / len(answers) if answers else 1.0,
        ttft_p50=at(0.5, ttft),
        ttft_p99=at(0.99, ttft),
        tpot_p50=at(0.5, tpot),
        tpot_p99=at(0.99, tpot),
        latency_p50=at(0.5, latency),
        latency_p99=at(0.99, latency),
        preemptions=sum(a.seq.preemptions for a in answers if a.seq),
        refused=sum(a.code == "overloaded" for a in answers),
        expired=sum(a.code == "deadline_exceeded" for a in answers),
        generated_tokens=sum(a.seq.output_len for a in answers if a.seq),
    )


def report(answers: list[Answer], iterations: int, busy: float, workers: int) -> Report:
    ends = [a.seq.timeline.finished if a.seq else a.job.request.arrival for a in answers]
    begin = min((a.job.request.arrival for a in answers), default=0.0)
    seconds = max(ends, default=0.0) - begin
    names = _unique(a.job.kind.name for a in answers)
    return Report(
        overall=summarize(answers),
        classes={name: summarize([a for a in answers if a.job.kind.name == name]) for name in names},
        goodput=sum(map(met, answers)) / seconds if seconds else 0.0,
        seconds=seconds,
        iterations=iterations,
        utilization=busy / (seconds * workers) if seconds else 0.0,
    )


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
