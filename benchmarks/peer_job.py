"""What every engine is asked and what it answers, in a process of its own; the standard library alone.

The job comes as JSON on stdin. The last line on stdout is the report: for each request the seconds at which it
was submitted, had its first and its last token, how many tokens it got and the first of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

WARM_UP = ("warm-up-1", "warm-up-2")


@dataclass(frozen=True)
class Request:
    id: str
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Job:
    """`together`: all requests are there at time 0; otherwise each comes when the one before has ended.

    `model` is a path, `seats` how many requests may be in the batch at a time, `program` a server to start.
    """

    requests: list[Request]
    together: bool
    seats: int
    model: str
    program: str

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output."""
        return max(len(r.prompt) + r.output_tokens for r in self.requests)

    @property
    def total(self) -> int:
        return sum(len(r.prompt) + r.output_tokens for r in self.requests)


@dataclass
class Answer:
    submitted: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    first_token: int | None = None


class Answers:
    """Times are seconds of `time.perf_counter()`."""

    def __init__(self) -> None:
        self.by_id: dict[str, Answer] = {}

    def submit(self, requests: list[Request]) -> None:
        now = time.perf_counter()
        for request in requests:
            self.by_id[request.id] = Answer(now)

    def add(self, request_id: str, token_ids: list[int], at: float | None = None) -> None:
        """Tokens that have arrived now, or at the time `at`."""
        if not token_ids:
            return
        answer, now = self.by_id[request_id], time.perf_counter() if at is None else at
        if answer.tokens == 0:
            answer.first, answer.first_token = now, token_ids[0]
        answer.tokens += len(token_ids)
        answer.last = now


def read_job() -> Job:
    fields = json.load(sys.stdin)
    return Job(**{**fields, "requests": [Request(**r) for r in fields["requests"]]})


def warm_up() -> list[Request]:
    """Two short requests, so that what is made on first use is there."""
    return [Request(name, list(range(100 + n, 132 + n)), 8) for n, name in enumerate(WARM_UP)]


def measure(
    job: Job,
    answer: Callable[[list[Request], Answers], None],
    version: str,
    spent: Callable[[], dict[str, float] | None] = lambda: None,
) -> None:
    """Run the job with `answer`, which returns when all requests it is given have ended; print the report.

    `spent` may say for how many seconds the engine has been busy with what, by name, since its start.
    """
    trial = Answers()
    trial.submit(warm_up())
    answer(warm_up(), trial)
    before, answers = spent(), Answers()
    for batch in [job.requests] if job.together else [[r] for r in job.requests]:
        answers.submit(batch)
        answer(batch, answers)
    after = spent()
    print(
        json.dumps(
            {
                "version": version,
                "answers": {name: asdict(a) for name, a in answers.by_id.items()},
                "time": after and {name: after[name] - (before or {}).get(name, 0.0) for name in after},
            }
        ),
        flush=True,
    )
