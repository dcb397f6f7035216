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

    def offset_ns(self) -> int:
        """What to add to a monotonic time in nanoseconds to get one since the epoch, as of now."""
        return int((self.wall() - self.monotonic()) * 1_000_000_000)
