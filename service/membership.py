"""Whether this worker may still take itself for a member of its group.

A broker takes a member's partitions away when it has not heard of it for the session timeout. A worker that was
frozen, or cut off, cannot know; so it stops publishing when its last successful word to the coordinator is older than
that, by its own clock, and goes on once the coordinator has answered again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiokafka.errors import IllegalGenerationError, NoError, RebalanceInProgressError, UnknownMemberIdError
from aiokafka.protocol.group import HeartbeatRequest, SyncGroupRequest

from plait.service.clock import Clock

# The last one is FENCED_INSTANCE_ID, which aiokafka has no name for: another process took a static member's place.
EXPELLED = (UnknownMemberIdError.errno, IllegalGenerationError.errno, 82)


class Membership:
    """`session_s` after the last word that a group's coordinator took, `expired` becomes true. A worker of several
    lanes is in as many groups: one that is overdue is enough, since batches hold the events of all."""

    def __init__(self, clock: Clock, session_s: float) -> None:
        self._clock = clock
        self._session_s = session_s
        self._until: dict[Any, float] = {}  # by coordinator, once it has let us in
        self._synced: dict[Any, float] = {}
        self._heard = asyncio.Event()

    @property
    def expired(self) -> bool:
        return not self._until or self._clock.monotonic() >= min(self._until.values())

    async def valid(self) -> None:
        """Return at once while the membership is fresh, otherwise when it is again."""
        while self.expired:
            self._heard.clear()
            await self._heard.wait()

    def heard(self, coordinator: Any, sent: float) -> None:
        """It took a word of ours that was sent at this monotonic time: for it, our time began later."""
        self._until[coordinator] = max(self._until.get(coordinator, sent), sent + self._session_s)
        self._heard.set()

    def settled(self, coordinator: Any) -> None:
        """A rebalance is over, and what we lost by it has been dropped. Before that the coordinator's word at its
        end does not count: it may have let us in anew, without what we had."""
        self.heard(coordinator, self._synced.pop(coordinator, self._clock.monotonic()))

    def leave(self, coordinator: Any) -> None:
        """Nothing of that group is ours any more."""
        self._until.pop(coordinator, None)
        self._heard.set()

    def listen(self, coordinator: Any) -> None:
        """Hear what this consumer's coordinator says to heartbeats, and when the end of a rebalance is asked for;
        aiokafka keeps it to itself."""
        send = coordinator._send_req

        async def send_and_hear(request: Any) -> Any:
            sent = self._clock.monotonic()
            response = await send(request)
            if isinstance(request, SyncGroupRequest):
                self._synced[coordinator] = sent
            elif isinstance(request, HeartbeatRequest):
                if response.error_code in (NoError.errno, RebalanceInProgressError.errno):
                    self.heard(coordinator, sent)
                elif response.error_code in EXPELLED:
                    self._until[coordinator] = float("-inf")
            return response

        coordinator._send_req = send_and_hear
