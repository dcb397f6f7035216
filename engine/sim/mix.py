"""Who sends the requests of a trace, and what they ask for: the trace itself does not say."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from zlib import crc32

from plait.engine.api import GenerationRequest, Objectives, SamplingParams
from plait.engine.sim.trace import Row


@dataclass(frozen=True, slots=True)
class Class:
    """A kind of request. Seconds; None where nothing is asked."""

    name: str
    share: float
    priority: int
    first_token: float | None = None
    per_token: float | None = None
    deadline: float | None = None


CLASSES = (
    Class("interactive", 0.3, priority=7, first_token=1.0, per_token=0.1),
    Class("standard", 0.5, priority=4, first_token=5.0, per_token=0.2),
    Class("batch", 0.2, priority=1, deadline=600.0),
)
TENANTS = {f"tenant-{number}": 1 / number for number in range(1, 9)}
"""Shares of the requests, unequal as Zipf's law has them."""
MAX_TOKENS = (None, 1024)
"""What requests name as their longest answer, each equally often: nothing, or a number that is always enough for the
Azure traces. How long an answer gets is known to nobody before its end."""


@dataclass(slots=True)
class Job:
    """A request, its class, and how many tokens will be generated for it, which the scheduler does not see."""

    request: GenerationRequest
    kind: Class
    output: int


def mix(
    rows: Seq[Row], *, limit: int, load: float = 1.0, seed: int = 0, classes: Seq[Class] = CLASSES
) -> list[Job]:
    """Requests of `classes` and TENANTS, drawn for each row of a trace whose arrival times are divided by `load`.

    `limit` is the longest sequence that the workers take: nobody names more than fits after the prompt. The draws
    depend on the seed and the row's number alone: the same request is of the same class at every load.
    """
    rng = random.Random(seed)
    n = len(rows)
    kinds = rng.choices(classes, [kind.share for kind in classes], k=n)
    tenants = rng.choices(list(TENANTS), list(TENANTS.values()), k=n)
    bounds = rng.choices(MAX_TOKENS, k=n)
    return [
        _job(number, row, row.at / load, kind, tenant, bound and max(1, min(bound, limit - row.prompt)))
        for number, (row, kind, tenant, bound) in enumerate(zip(rows, kinds, tenants, bounds, strict=True))
    ]


def _job(number: int, row: Row, at: float, kind: Class, tenant: str, bound: int | None) -> Job:
    request = GenerationRequest(
        request_id=f"r{number}",
        # No two prompts begin alike: the trace does not say which ones did.
        prompt_token_ids=[number] * row.prompt,
        sampling=SamplingParams(max_tokens=bound),
        priority=kind.priority,
        tenant=tenant,
        arrival=at,
        slo=Objectives(
            first_token=None if kind.first_token is None else at + kind.first_token,
            per_token=kind.per_token,
            deadline=None if kind.deadline is None else at + kind.deadline,
        ),
    )
    return Job(request, kind, row.output)


def spread(jobs: Seq[Job], workers: int) -> list[list[Job]]:
    """The jobs of each worker: by a hash of the request id, as records with keys are spread over partitions."""
    shares: list[list[Job]] = [[] for _ in range(workers)]
    for job in jobs:
        shares[crc32(job.request.request_id.encode()) % workers].append(job)
    return shares
