"""A trace, so many workers, a policy: what comes of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from plait.engine.recorder import Recorder
from plait.engine.sim.mix import mix, spread
from plait.engine.sim.profile import Profile
from plait.engine.sim.report import Report, report
from plait.engine.sim.trace import Row
from plait.engine.sim.worker import Answer, Worker


def simulate(
    rows: Seq[Row],
    profile: Profile,
    *,
    policy: str,
    workers: int = 1,
    load: float = 1.0,
    seed: int = 0,
    recorder: Recorder | None = None,
    **settings: Any,
) -> Report:
    """`settings` are those of the engine. What the first worker does is recorded."""
    answers: list[Answer] = []
    iterations, busy = 0, 0.0
    # No two prompts begin alike: looking for what they share would only take time.
    config = profile.config(**{"policy": policy, "prefix_cache": False, **settings})
    jobs = mix(rows, limit=profile.max_tokens_total, load=load, seed=seed)
    for number, share in enumerate(spread(jobs, workers)):
        worker = Worker(profile, config, seed + number, None if number else recorder)
        answers += worker.run(share)
        iterations += worker.iterations
        busy += worker.busy
    return report(answers, iterations, busy, workers)


def sweep(
    rows: Seq[Row], profile: Profile, *, policies: Seq[str], loads: Seq[float], **options: Any
) -> dict[str, list[Report]]:
    """The reports of each policy, by load; as many at a time as there are processors."""
    with ProcessPoolExecutor() as pool:
        waiting = {
            policy: [
                pool.submit(simulate, rows, profile, policy=policy, load=load, **options) for load in loads
            ]
            for policy in policies
        }
        return {policy: [future.result() for future in futures] for policy, futures in waiting.items()}
