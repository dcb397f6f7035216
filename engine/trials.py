"""Finds the request that kills the engine, so that it does not take the others with it.

After a first crash everybody comes back at once: most crashes are nobody's fault. After a second one those that may be
to blame come back one by one, each beside those that are known to be harmless, and what was not yet seen running
waits; a crash is then the fault of the one on trial.
"""

from __future__ import annotations

from collections.abc import Iterable

from plait.engine.live import Live

HARMLESS_AFTER = 8
"""Tokens after which a request is taken to be harmless."""


class Trials:
    def __init__(self, max_restarts: int):
        self.max_restarts = max_restarts
        self.careful_at = min(2, max_restarts)
        self.suspects: list[Live] = []
        self.held: list[Live] = []

    def blame(self, live: Iterable[Live]) -> list[Live]:
        """Count a crash. Gives those that have now been to blame too often."""
        on_trial = self.suspects[:1]
        if not (on_trial and on_trial[0].running):
            on_trial = [x for x in live if x.running]
        for x in on_trial:
            x.crashes += 1
        return [x for x in on_trial if x.crashes > self.max_restarts]

    def restart(self, live: Iterable[Live]) -> list[Live]:
        """A new engine is up, which has nothing yet. Gives those to send to it now."""
        live = list(live)
        for x in live:
            x.sent = x.running = False
            x.since = 0
        self.suspects, self.held = [], []
        if all(x.crashes < self.careful_at for x in live):
            return live
        self.suspects = sorted((x for x in live if x.crashes), key=lambda x: x.crashes)
        harmless = [x for x in live if not x.crashes and x.timeline.first_token is not None]
        self.held = [x for x in live if not x.crashes and x.timeline.first_token is None]
        return harmless + self.suspects[:1]

    def admits(self, x: Live) -> bool:
        """Whether a new request may go to the engine at once; if not, `next` will give it."""
        if self.suspects:
            self.held.append(x)
        return not self.suspects

    def passed(self, x: Live) -> None:
        """It got tokens."""
        if x.since >= HARMLESS_AFTER:
            x.crashes = 0

    def next(self) -> list[Live]:
        """Those to send now, if the one on trial has passed or ended."""
        if self.suspects and not self._is_done(self.suspects[0]):
            return []
        while self.suspects and self._is_done(self.suspects[0]):
            self.suspects.pop(0)
        if self.suspects:
            return self.suspects[:1]
        ready, self.held = [x for x in self.held if not x.over], []
        return ready

    @staticmethod
    def _is_done(x: Live) -> bool:
        return x.over or not x.crashes
