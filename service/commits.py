"""Commits what is finished, and what the next owner of a partition must know beside it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    KafkaError,
    OffsetMetadataTooLargeError,
)

from plait.service import commit_metadata
from plait.service.kafka import say
from plait.service.leases import Partition
from plait.service.metrics import Metrics
from plait.service.settings import WorkerSettings

log = logging.getLogger(__name__)

COMMIT_TIMEOUT_S = 5.0
RETRY_S = 0.05
Partitions = Mapping[TopicPartition, Partition]


class Commits:
    """One commit at a time: on a timer, when `soon` is called, and when the intake asks for one.

    `consumer` and `partitions` are set by the intake, at the start and at each assignment; `on_durable` is
    called after each commit.
    """

    def __init__(self, metrics: Metrics, settings: WorkerSettings, on_durable: Callable[[], None]) -> None:
        self.consumer: Any = None
        self.partitions: Partitions = {}
        self._metrics = metrics
        self._on_durable = on_durable
        transactional = settings.delivery == "transactional"
        self._interval_s = settings.transaction_interval_s if transactional else settings.commit_interval_s
        self._limit = commit_metadata.LIMIT
        self.busy = asyncio.Lock()  # held during a commit
        self._wanted = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []

    async def run(self) -> None:
        """Commit until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            if self.consumer is not None and not self.consumer._subscription.reassignment_in_progress:
                await self._try()
            if self._waiters or any(partition.waiting for partition in self.partitions.values()):
                await asyncio.sleep(RETRY_S)
                self._wanted.set()

    def soon(self) -> None:
        """Commit at once, without waiting for the timer."""
        self._wanted.set()

    async def recorded(self) -> None:
        """Return once a commit that began after this call is durable."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        self.soon()
        await future

    async def _try(self) -> None:
        try:
            await self.commit()
        except Exception:
            log.exception("committing")  # the next round repeats it

    async def commit(self, *, clean: bool = False, limit_s: float = COMMIT_TIMEOUT_S) -> bool:
        """Commit what has changed; whether all of it is durable now. Never raises for what the broker says.

        `clean`: this worker is about to leave the partitions in order.
        """
        async with self.busy:
            waiters: list[asyncio.Future[None]] = []
            if not clean:
                waiters, self._waiters = self._waiters, []
            done = False
            try:
                done = await self._commit_changes(clean, limit_s)
            finally:
                self._settle(waiters, done)
            return done

    async def _commit_changes(self, clean: bool, limit_s: float) -> bool:
        consumer = self.consumer
        if consumer is None:
            return False
        assigned = consumer.assignment()
        reaches: dict[Partition, int] = {}
        offsets: dict[TopicPartition, tuple[int, str]] = {}
        for tp, partition in self.partitions.items():
            if tp not in assigned or not partition.is_open:
                continue
            position = partition.tracker.position
            if position is None and partition.waiting:
                position = partition.waiting[0].offset
            if position is None:
                continue
            progress = partition.progress(clean=clean)
            pair = position, commit_metadata.encode(position, progress, self._limit)
            unsettled = partition.channel is not None and partition.channel.dirty
            if pair != partition.committed or unsettled:
                offsets[tp] = pair
                reaches[partition] = progress.reach
        if offsets and not await self._send(consumer, offsets, limit_s):
            return False
        for tp, pair in offsets.items():
            if (current := self.partitions.get(tp)) in reaches:
                current.committed = pair
                current.reach = reaches[current]
        self._on_durable()
        return True

    def _settle(self, waiters: list[asyncio.Future[None]], done: bool) -> None:
        for waiter in waiters:
            if not waiter.done():
                if done:
                    waiter.set_result(None)
                else:
                    self._waiters.append(waiter)

    async def _commit(self, consumer: Any, offsets: dict[TopicPartition, tuple[int, str]]) -> bool:
        """By the consumer, or by the transactions of the partitions; whether all of it worked."""
        channels = {tp: self.partitions[tp].channel for tp in offsets if tp in self.partitions}
        ends = [channel.commit(*offsets[tp]) for tp, channel in channels.items() if channel is not None]
        if ends:
            return all(await asyncio.gather(*ends))
        await consumer.commit(offsets)
        return True

    async def _send(
        self, consumer: Any, offsets: dict[TopicPartition, tuple[int, str]], limit_s: float
    ) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                if not await self._commit(consumer, offsets):
                    return False
        except (CommitFailedError, IllegalStateError) as error:
            self._metrics.commits.labels(result="dropped").inc()
            log.info("a commit was dropped, the partitions have moved on: %s", say(error))
        except OffsetMetadataTooLargeError:
            self._metrics.commits.labels(result="failed").inc()
            self._limit //= 2
            log.warning(
                "the brokers take less metadata (offset.metadata.max.bytes) than %d bytes with a commit: from now on "
                "at most %d; what does not fit is looked up in the response topics",
                2 * self._limit,
                self._limit,
            )
        except (KafkaError, TimeoutError) as error:
            self._metrics.commits.labels(result="failed").inc()
            log.warning("a commit failed, the next one repeats it: %s", say(error))
        else:
            self._metrics.commits.labels(result="ok").inc()
            return True
        return False
