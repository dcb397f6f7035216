"""A partition's transactions, with a producer that is told what to do."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition

from plait.service import transactions
from plait.service.clock import Clock
from plait.service.commits import Commits
from plait.service.leases import Partition
from plait.service.membership import Membership
from plait.service.metrics import Metrics
from plait.service.settings import Settings, WorkerSettings
from plait.service.transactions import Channel
from service_bench import until


class Producer:
    """Its coordinator answers while `answers` is set."""

    def __init__(self, **_: Any) -> None:
        self.client = self
        self.answers, self.flushed = asyncio.Event(), asyncio.Event()
        self.flushed.set()
        self._txn_manager = SimpleNamespace(is_in_transaction=lambda: False)
        self.committed: list[Any] = []
        self._topics: set[str] = set()

    def add_topic(self, topic: str) -> None:
        self._topics.add(topic)

    async def send(self, *_: Any, **__: Any) -> asyncio.Future[Any]:
        delivery = asyncio.get_running_loop().create_future()
        delivery.set_result(None)
        return delivery

    async def flush(self) -> None:
        await self.flushed.wait()

    async def stop(self) -> None: ...

    async def send_offsets_to_transaction(self, offsets: Any, group: str) -> None:
        await self.answers.wait()
        self.committed.append(offsets)

    async def commit_transaction(self) -> None: ...

    async def begin_transaction(self) -> None: ...


PARTITION = TopicPartition("requests", 0)


def make_channel() -> Channel:
    membership = Membership(Clock(), 1e9)
    membership.heard("coordinator", Clock().monotonic())
    return Channel(Settings(), membership, "g", PARTITION, pytest.fail, Producer)


async def test_topics_that_are_sent_to_no_more_are_forgotten() -> None:
    channel = make_channel()
    channel._producer.answers.set()
    for number in range(3):
        await channel.send(f"answers-{number}", b"v", b"k", [])
    assert await channel.commit(5, "")
    assert channel._producer._topics == {f"answers-{number}" for number in range(3)}
    for topic in channel._used:
        channel._used[topic] -= transactions.FORGET_S + 1
    await channel.send("answers-1", b"v", b"k", [])
    assert len(channel._producer._topics) == 3, "something could still wait for a leader"
    assert await channel.commit(6, "")
    assert channel._producer._topics == {"answers-1"} and list(channel._used) == ["answers-1"]


async def test_a_commit_that_takes_too_long_goes_on() -> None:
    """Until it is through its events are not committed, and the next commit waits for it."""
    channel = make_channel()
    await channel.send("answers", b"v", b"k", [])
    assert channel.dirty
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await channel.commit(5, "")
    assert channel.dirty
    channel._producer.answers.set()
    assert await channel.commit(6, "")
    assert not channel.dirty
    assert channel._producer.committed == [{PARTITION: (5, "")}, {PARTITION: (6, "")}]


async def test_a_channel_that_is_closed_during_a_commit_leaves_the_others_to_be_committed() -> None:
    """Its commit has failed: the task that commits for all partitions goes on."""
    channel = make_channel()
    partition = Partition(PARTITION, 1)
    partition.restore(0, None, 0)
    partition.tracker.deliver(0)
    partition.channel = channel
    commits = Commits(Metrics(), WorkerSettings(delivery="transactional"), lambda: None)
    commits.consumer = SimpleNamespace(
        assignment=lambda: {PARTITION}, _subscription=SimpleNamespace(reassignment_in_progress=False)
    )
    commits.partitions = {PARTITION: partition}
    channel._producer.flushed.clear()
    await channel.send("answers", b"v", b"k", [])
    running = asyncio.create_task(commits.run())
    commits.soon()
    await until(lambda: channel._ending is not None)
    await channel.close()
    commits.partitions = {}
    await commits.recorded()
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])
