"""What a policy is: an order among sequences, and who makes room for whom."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from math import inf

from plait.engine.config import EngineConfig
from plait.engine.outlook import Outlook
from plait.engine.sequence import Chunk, Sequence


class Policy:
    """First come, first served; the other policies say what they do differently.

    The waiting queue keeps each lane in a heap, so a key must not change while its sequence waits, except at the
    moment that came with it; what changes for a whole lane at once (a tenant's share, say) belongs into `rank`.
    The scheduler itself puts first what has waited too long or was preempted too often: no policy need care.
    """

    def __init__(self, config: EngineConfig, outlook: Outlook):
        self.config = config
        self.outlook = outlook

    def lane(self, seq: Sequence) -> Hashable:
        """Which heap it waits in; never changes."""
        return None

    def key(self, seq: Sequence, now: float) -> tuple[float, float]:
        """Its place in the lane, the smallest first, and the moment from which `expired` is to be asked instead."""
        return seq.timeline.arrived, inf

    def expired(self, seq: Sequence) -> float:
        """Its place from then on; cheap, since thousands may expire at once."""
        return seq.key

    def rank(self, seq: Sequence) -> float:
        """Its place among all: the smallest runs next, the largest is preempted first; in a lane as by key."""
        return seq.key

    def yields(self, running: Sequence, waiting: Sequence, now: float) -> bool:
        """Whether the one that runs is strictly less urgent, so that it is preempted for want of a seat or memory."""
        return False

    def queued(self, seq: Sequence) -> None:
        """It begins to wait, or waits again."""

    def unqueued(self, seq: Sequence) -> None:
        """It waits no more."""

    def admitted(self, seq: Sequence) -> None:
        """It runs."""

    def advanced(self, chunks: Iterable[Chunk]) -> None:
        """These were computed."""
