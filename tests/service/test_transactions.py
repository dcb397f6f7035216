"""A partition's transactions, with a producer that is told what to do."""

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition

from plait.service.clock import Clock
from plait.service.membership import Membership
from plait.service.settings import Settings
from plait.service.transactions import Channel


class Producer:
    """Its coordinator answers while `answers` is set."""

    def __init__(self, **_: Any) -> None:
        self.client = self
        self.answers = asyncio.Event()
        self.committed: list[Any] = []

    def add_topic(self, topic: str) -> None: ...

    async def send(self, *_: Any, **__: Any) -> asyncio.Future[Any]:
        delivery = asyncio.get_running_loop().create_future()
        delivery.set_result(None)
        return delivery

    async def flush(self) -> None: ...

    async def send_offsets_to_transaction(self, offsets: Any, group: str) -> None:
        await self.answers.wait()
        self.committed.append(offsets)

    async def commit_transaction(self) -> None: ...

    async def begin_transaction(self) -> None: ...


async def test_a_commit_that_takes_too_long_goes_on() -> None:
    """Until it is through its events are not committed, and the next commit waits for it."""
    membership = Membership(Clock(), 1e9)
    membership.heard("coordinator", Clock().monotonic())
    partition = TopicPartition("requests", 0)
    channel = Channel(Settings(), membership, "g", partition, pytest.fail, Producer)
    await channel.send("answers", b"v", b"k", [])
    assert channel.dirty
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await channel.commit(5, "")
    assert channel.dirty
    channel._producer.answers.set()
    assert await channel.commit(6, "")
    assert not channel.dirty
    assert channel._producer.committed == [{partition: (5, "")}, {partition: (6, "")}]
