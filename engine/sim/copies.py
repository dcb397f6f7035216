"""Copies between the pools of a simulated device and host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plait.engine.config import EngineConfig
from plait.engine.sim.profile import Profile
from plait.engine.swap_cost import SwapCosts
from plait.engine.transfer import Pairs

HOST_BYTES = {"cpu": 1 << 30}
"""The engine's default, where the host has enough; 4 GiB on the others."""


@dataclass(slots=True)
class Arrival:
    """A copy that is done at `end`."""

    end: float
    clock: Callable[[], float]

    def done(self) -> bool:
        return self.clock() >= self.end


class Copies:
    """A mover whose copies take the time that the profile's bandwidth says. A CPU makes them itself: `take` gives the
    seconds by which they hold up what comes next. A GPU makes them one after another beside its iterations."""

    ahead = 0

    def __init__(self, profile: Profile, costs: SwapCosts, clock: Callable[[], float]):
        self.seconds = profile.block_bytes / profile.copy_bytes_per_s
        self.costs, self.clock = costs, clock
        self.beside = profile.device != "cpu"
        self._held = 0.0
        self._end = 0.0

    def out(self, pairs: Pairs) -> None:
        self._copy(len(pairs), out=True)

    def into(self, pairs: Pairs) -> Arrival | None:
        self._copy(len(pairs), out=False)
        return Arrival(self._end, self.clock) if self.beside else None

    def _copy(self, blocks: int, out: bool) -> None:
        seconds = blocks * self.seconds
        self.costs.moved(blocks, seconds, out=out)
        if self.beside:
            self._end = max(self._end, self.clock()) + seconds
        else:
            self._held += seconds

    def take(self) -> float:
        held, self._held = self._held, 0.0
        return held


def host_blocks(config: EngineConfig, profile: Profile) -> int:
    """Blocks of the host's pool."""
    wanted = config.swap_bytes if config.swap_bytes >= 0 else HOST_BYTES.get(profile.device, 4 << 30)
    return wanted // profile.block_bytes
