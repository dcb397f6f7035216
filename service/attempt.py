"""One attempt at a request: when it is open, and when one too many has failed."""

from __future__ import annotations

import asyncio

from plait.service.choices import Choices
from plait.service.history import History
from plait.service.leases import Lease


class Poisoned(Exception):
    """A request that took the engine, or the worker, down too often: it is dead-lettered, and answered."""


class Attempt:
    """Open from `begin` until `passed`, except while the request only waits in the engine's queue: were the worker
    to die then, this request could be the reason. `trial` is held by the one request that is suspected."""

    def __init__(self, lease: Lease, choices: Choices, trial: asyncio.Lock, max_attempts: int) -> None:
        self._lease = lease
        self._choices = choices
        self._trial = trial
        self._max_attempts = max_attempts
        self._open = False
        self._on_trial = False

    async def begin(self, history: History) -> None:
        """Note that an attempt begins, durably where there may have been one before. Raises Poisoned."""
        lease = self._lease
        if lease.before is not None and history.progressed_since(lease.before.epoch):
            lease.before = None  # that attempt got further: whatever ended the worker, it was not its start
        if lease.before is not None:
            if lease.before.attempts >= self._max_attempts:
                raise Poisoned(f"{lease.before.attempts} workers died while they ran this request")
            # One at a time, so that the next crash is the fault of the one that ran.
            await self._trial.acquire()
            self._on_trial = True
        self._open = True
        lease.attempt_epoch = history.epoch + 1
        lease.at_risk = self._at_risk
        if lease.maybe_started:
            await lease.recorded()

    def passed(self) -> None:
        """It has a token, or its end: nobody suspects it any more."""
        self._open = False
        if self._on_trial:
            self._on_trial = False
            self._trial.release()

    def _at_risk(self) -> bool:
        return self._open and (not self._choices.submitted or self._choices.begun)
