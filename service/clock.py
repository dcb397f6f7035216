"""The two clocks a worker reads, in one injectable place."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """`monotonic` in seconds, the clock of the engine's timelines; `wall` in seconds since the epoch."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def wall_ms(self) -> int:
        return int(self.wall() * 1000)

    def epoch_ns(self, monotonic: float) -> int:
        """A monotonic time of this machine as nanoseconds since the epoch."""
        return int((self.wall() - self.monotonic() + monotonic) * 1_000_000_000)
