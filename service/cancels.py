"""Cancellations that were read before their request."""

from __future__ import annotations

from collections import OrderedDict

from plait.service.clock import Clock


class Cancels:
    """The last `number` cancelled request ids, each for `seconds`."""

    def __init__(self, number: int, seconds: float, clock: Clock) -> None:
        self._number = number
        self._seconds = seconds
        self._clock = clock
        self._at: OrderedDict[str, float] = OrderedDict()

    def remember(self, request_id: str) -> None:
        self._at[request_id] = self._clock.monotonic()
        self._at.move_to_end(request_id)
        while len(self._at) > self._number:
            self._at.popitem(last=False)

    def seen(self, request_id: str) -> bool:
        at = self._at.get(request_id)
        return at is not None and self._clock.monotonic() - at <= self._seconds
