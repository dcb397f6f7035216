"""A trace, so many workers, a policy: what comes of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor

from plait.engine.config import EngineConfig
from plait.engine.sim.mix import mix, spread
from plait.engine.sim.profile import Profile
from plait.engine.sim.report import Report, report
from plait.engine.sim.trace import Row
from plait.engine.sim.worker import Answer, Worker


def simulate(
    rows: Seq[Row], profile: Profile, *, policy: str, workers: int = 1, load: float = 1.0, seed: int = 0
) -> Report:
    answers: list[Answer] = []
    iterations, busy = 0, 0.0
    config = profile.config(policy=policy_name(policy))
    jobs = mix(rows, limit=profile.max_tokens_total, load=load, seed=seed)
    for number, share in enumerate(spread(jobs, workers)):
        worker = Worker(profile, config, seed=seed + number)
        answers += worker.run(share)
        iterations += worker.iterations
        busy += worker.busy
    return report(answers, iterations, busy, workers)


def policy_name(name: str) -> str:
    """`default` is whatever a worker runs that was told nothing."""
    return EngineConfig().policy if name == "default" else name


def sweep(
    rows: Seq[Row],
    profile: Profile,
    *,
    policies: Seq[str],
    loads: Seq[float],
    workers: int = 1,
    seed: int = 0,
) -> dict[str, list[Report]]:
    """The reports of each policy, by load; as many at a time as there are processors."""
    with ProcessPoolExecutor() as pool:
        waiting = {
            policy: [
                pool.submit(simulate, rows, profile, policy=policy, workers=workers, load=load, seed=seed)
                for load in loads
            ]
            for policy in policies
        }
        return {policy: [future.result() for future in futures] for policy, futures in waiting.items()}
