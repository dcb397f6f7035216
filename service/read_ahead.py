"""How much each lane may read ahead: a bound for all lanes together, divided by reserves and weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plait.service.settings import LaneSettings, WorkerSettings


@dataclass(slots=True)
class _Usage:
    lane: LaneSettings
    hungry: bool = False
    of: dict[str, int] = field(default_factory=lambda: {"requests": 0, "bytes": 0})


class ReadAhead:
    """Counts what is in flight, in requests and in bytes of their messages.

    A lane's reserve is kept free for it. The rest is for whoever comes first, until another lane is hungry, which
    is when its last poll filled all the room that it had: from then on no hungry lane gets more of the rest
    than its weight's share. Nothing that runs is taken away; a lane that is over its share reads nothing
    until enough has ended.
    """

    def __init__(self, limits: WorkerSettings, lanes: Sequence[LaneSettings]) -> None:
        self._limits = limits
        self._lanes = {lane.name: _Usage(lane) for lane in lanes}
        self._listeners: list[Callable[[], None]] = []

    def listen(self, on_freed: Callable[[], None]) -> None:
        """Be told when something has ended: there may be room now."""
        self._listeners.append(on_freed)

    def take(self, lane: str, size: int) -> None:
        """A request of `size` bytes is in flight."""
        used = self._lanes[lane].of
        used["requests"] += 1
        used["bytes"] += size

    def give_back(self, lane: str, size: int) -> None:
        used = self._lanes[lane].of
        used["requests"] -= 1
        used["bytes"] -= size
        for on_freed in self._listeners:
            on_freed()

    def want(self, lane: str, hungry: bool) -> None:
        """Whether this lane would read more if it had the room."""
        self._lanes[lane].hungry = hungry

    def requests(self, lane: str) -> int:
        return self._lanes[lane].of["requests"]

    def bytes(self, lane: str) -> int:
        return self._lanes[lane].of["bytes"]

    def byte_limit(self, lane: str) -> int:
        """The most bytes that this lane can have in flight when the others have nothing."""
        limit = self._limits.max_in_flight_bytes
        return limit - sum(_reserve(u.lane, limit) for name, u in self._lanes.items() if name != lane)

    def room(self, lane: str) -> int:
        """How many requests this lane may read now."""
        if self._room(lane, self._limits.max_in_flight_bytes, "bytes") <= 0:
            return 0
        return max(0, self._room(lane, self._limits.max_in_flight, "requests"))

    def _room(self, name: str, limit: int, unit: str) -> int:
        shared = free = limit - sum(_reserve(u.lane, limit) for u in self._lanes.values())
        for usage in self._lanes.values():
            free -= max(0, usage.of[unit] - _reserve(usage.lane, limit))
        lane = self._lanes[name].lane
        used, reserve = self._lanes[name].of[unit], _reserve(lane, limit)
        rivals = sum(u.lane.weight for u in self._lanes.values() if u.hungry and u.lane is not lane)
        if rivals:
            # Rounded up, so that a lane without reserve gets through however small its share is.
            share = math.ceil(shared * lane.weight / (lane.weight + rivals))
            free = min(free, share - max(0, used - reserve))
        return max(0, reserve - used) + max(0, free)


def _reserve(lane: LaneSettings, limit: int) -> int:
    return math.floor(lane.reserved * limit)
