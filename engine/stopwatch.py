"""Where the engine's time goes."""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter


class Stopwatch:
    """Seconds by what they were spent on; each lap goes to what has just been done."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._at = perf_counter()

    def lap(self, name: str) -> None:
        now = perf_counter()
        self.seconds[name] += now - self._at
        self._at = now
