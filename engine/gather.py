"""When sequences may join the batch: what `batching` and `batch_window_ms` mean."""

from __future__ import annotations

from math import inf

from plait.engine.config import EngineConfig


class Gate:
    """How many may join now.

    continuous: whoever finds a place, at every iteration (iteration-level scheduling, Orca, OSDI 2022). While nothing
    runs, a window may gather company first.
    dynamic: a batch starts when it is full or the window is over, and nobody joins until all of it have ended
    (Triton's dynamic batcher).
    static: the same, but a batch starts only when it is full, or when somebody has waited `max_wait_seconds`
    (request-level scheduling with a fixed batch size).
    """

    def __init__(self, config: EngineConfig):
        self.continuous = config.batching == "continuous"
        self.size = config.max_running
        window = config.batch_window_ms / 1000
        self.window = min(inf if config.batching == "static" else window, config.max_wait_seconds)
        self.places = 0.0
        self.gathers = True

    def open(self, running: int, waiting: int, oldest: float, now: float) -> None:
        """Look at the queue: `oldest` is when the first of those that wait arrived."""
        if running:
            if self.continuous:
                self.places = inf
            return
        ready = waiting >= self.size or now >= self.opens_at(oldest)
        self.places = 0 if not ready else inf if self.continuous else min(waiting, self.size)

    def joined(self) -> None:
        self.places -= 1

    def left(self) -> None:
        """One that runs was preempted: it keeps its place in the batch."""
        self.places += 1

    def close(self) -> None:
        """The batch is as large as memory allows."""
        if not self.continuous:
            self.places = 0

    def opens_at(self, oldest: float) -> float:
        return oldest + self.window if self.gathers else oldest
