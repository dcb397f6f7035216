"""Cancellations are remembered for a bounded time and number."""

from plait.service.cancels import Cancels
from plait.service.clock import Clock


def test_bounded_in_number_and_time() -> None:
    now = [0.0]
    cancels = Cancels(2, 10.0, Clock(monotonic=lambda: now[0]))
    for name in ("a", "b", "a", "c"):
        cancels.remember(name)
    assert cancels.seen("a") and cancels.seen("c") and not cancels.seen("b")
    now[0] = 10.5
    assert not cancels.seen("a")
    cancels.remember("d")
    assert cancels.seen("d")
