"""What aiokafka says around each rebalance, passed on to the intake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokafka import ConsumerRebalanceListener, TopicPartition

if TYPE_CHECKING:
    from plait.service.intake import Intake


class Rebalances(ConsumerRebalanceListener):  # type: ignore[misc]
    """Passes on what aiokafka says around each rebalance, as long as this consumer is the intake's."""

    def __init__(self, intake: Intake, consumer: Any) -> None:
        self._intake = intake
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        if self._intake.reads_with(self._consumer):
            await self._intake.revoked(revoked)

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        if self._intake.reads_with(self._consumer):
            await self._intake.reassigned(assigned)
