"""What is cheaper: to copy KV out and back, or to compute it again. Fitted to what the engine does.

What a copy takes is a ratio of discounted sums, seconds over bytes: large copies count more than small ones, old
ones fade, and one outlier moves little. What computing takes is the iteration-time model's to say.
"""

from __future__ import annotations

from plait.engine.time_model import TimeModel

KEEP = 0.95
"""What is left of an observation's weight after the next one."""
OUTLIER = 4.0
"""An observation counts as at most so many times what was expected, and at least as that part of it."""


class Rate:
    """Seconds per unit. The prior counts as an observation of `units` units."""

    def __init__(self, prior: float, units: float):
        self.seconds, self.units = prior * units, units

    @property
    def value(self) -> float:
        return self.seconds / self.units

    def add(self, units: float, seconds: float) -> None:
        expected = self.value * units
        seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        self.seconds = self.seconds * KEEP + seconds
        self.units = self.units * KEEP + units


class SwapCosts:
    """Seconds to recompute tokens and to copy blocks of `block_bytes` bytes and `block_size` tokens.

    The prior of a copy is 8 GB/s, that of a small processor's memory; a few copies replace it.
    """

    def __init__(self, block_bytes: int, block_size: int):
        self.block_bytes, self.block_size = block_bytes, block_size
        self.times = TimeModel()
        """The scheduler's, once there is one."""
        self.out, self.into = Rate(1 / 8e9, 1 << 20), Rate(1 / 8e9, 1 << 20)

    def moved(self, blocks: int, seconds: float, *, out: bool) -> None:
        """A copy of so many blocks, to the host if `out`, took `seconds`."""
        (self.out if out else self.into).add(blocks * self.block_bytes, seconds)

    def recompute(self, tokens: int) -> float:
        """Seconds by which iterations get longer when so many first tokens of a sequence are computed in them."""
        times = self.times
        again = times.predict(tokens, 0, 0, tokens * tokens / 2) - times.predict(0, 0, 0)
        return max(again, tokens * times.per_prompt_token)

    def transfer(self, out: int, into: int) -> float:
        """Seconds to copy `out` blocks to the host and `into` blocks back."""
        return self.block_bytes * (out * self.out.value + into * self.into.value)

    def fetching_pays(self) -> bool:
        """Whether a block is copied from the host sooner than its tokens are computed."""
        return self.transfer(0, 1) < self.recompute(self.block_size)

    def demoting_pays(self) -> bool:
        """Whether a block that may be asked for again is worth its way out, and back."""
        return self.transfer(1, 1) < self.recompute(self.block_size)
