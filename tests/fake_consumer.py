"""An intake and a consumer under the test's control, in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiokafka import TopicPartition
from aiokafka.structs import ConsumerRecord, OffsetAndMetadata

from plait.service.clock import Clock
from plait.service.commit_metadata import Progress, decode
from plait.service.intake import Intake
from plait.service.leases import Lease
from plait.service.membership import Membership
from plait.service.metrics import Metrics
from plait.service.settings import Settings
from service_bench import until

POISON = object()  # stands for a record that cannot be decoded
P0, P1 = TopicPartition("plait.requests", 0), TopicPartition("plait.requests", 1)


class FakeConsumer:
    """As much of AIOKafkaConsumer as the intake uses. Pausing throws away nothing here: `log` stays."""

    def __init__(self, **_: Any) -> None:
        self.log: dict[TopicPartition, list[Any]] = {P0: [], P1: []}
        self.at: dict[TopicPartition, int] = {}
        self.commits: list[dict[TopicPartition, tuple[int, str]]] = []
        self.commit_errors: list[Exception] = []
        self.poll_errors: list[Exception] = []
        self.committed_errors: list[Exception] = []
        self.polls = 0
        self.stopped = False
        self.topic_gone = False
        self.reassignment_in_progress = False
        self.member_id, self.generation = "m1", 0
        self._paused: set[TopicPartition] = set()
        self._coordinator = self._subscription = self
        self.listener: Any = None

    def subscribe(self, topics: list[str], listener: Any) -> None:
        self.listener = listener

    async def start(self) -> None:
        await self.rebalance({P0, P1})

    async def stop(self) -> None:
        self.stopped = True

    def assignment(self) -> set[TopicPartition]:
        return set(self.at)

    def is_assigned(self, tp: TopicPartition) -> bool:
        return tp in self.at

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return None if self.topic_gone else {0, 1}

    def paused(self) -> set[TopicPartition]:
        return set(self._paused)

    @contextmanager
    def fetch_context(self) -> Iterator[None]:
        self.polls += 1
        yield

    def pause(self, *tps: TopicPartition) -> None:
        self._paused |= set(tps)

    def resume(self, *tps: TopicPartition) -> None:
        self._paused -= set(tps)

    def highwater(self, tp: TopicPartition) -> int:
        return len(self.log[tp])

    async def _send_req(self, request: Any) -> Any:
        raise NotImplementedError

    async def fetch_committed_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, Any]:
        if self.committed_errors:
            raise self.committed_errors.pop(0)
        pairs = {tp: c[tp] for c in self.commits for tp in tps if tp in c}
        return {tp: OffsetAndMetadata(*pair) for tp, pair in pairs.items()}

    async def beginning_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 0)

    async def end_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: len(self.log[tp]) for tp in tps}

    async def commit(self, offsets: dict[TopicPartition, tuple[int, str]]) -> None:
        if self.commit_errors:
            raise self.commit_errors.pop(0)
        assert set(offsets) <= self.assignment()
        self.commits.append(offsets)

    def last_state(self, tp: TopicPartition) -> tuple[int, Progress]:
        position, text = next(c[tp] for c in reversed(self.commits) if tp in c)
        progress = decode(position, text)
        assert progress is not None
        return position, progress

    def last_commit(self, tp: TopicPartition) -> int:
        return next((c[tp][0] for c in reversed(self.commits) if tp in c), 0)

    async def committed(self, tp: TopicPartition) -> int | None:
        if self.committed_errors:
            raise self.committed_errors.pop(0)
        return self.last_commit(tp) or None

    async def position(self, tp: TopicPartition) -> int:
        return self.at[tp]

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self.at[tp] = offset

    async def getmany(
        self, *only: TopicPartition, timeout_ms: int, max_records: int
    ) -> dict[TopicPartition, list[Any]]:
        self.polls += 1
        await asyncio.sleep(0.001)
        if self.poll_errors:
            raise self.poll_errors.pop(0)
        result: dict[TopicPartition, list[Any]] = {}
        for tp in sorted(((set(only) & self.at.keys()) if only else self.at.keys()) - self._paused):
            start = self.at[tp]
            found = self.log[tp][start : start + max_records]
            if POISON in found:
                # As aiokafka does: what was drained of other partitions until now is lost.
                raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
            if found:
                max_records -= len(found)
                self.at[tp] += len(found)
                result[tp] = found
            if max_records == 0:
                break
        return result

    async def rebalance(
        self, assigned: set[TopicPartition], member: str = "m1", generations: int = 1
    ) -> None:
        await self.listener.on_partitions_revoked(self.assignment())
        self.member_id, self.generation = member, self.generation + generations
        self.at = {tp: self.last_commit(tp) for tp in assigned}
        self._paused = set()
        await self.listener.on_partitions_assigned(assigned)

    def produce(self, tp: TopicPartition, count: int, size: int = 1) -> None:
        for _ in range(count):
            offset, value = len(self.log[tp]), b"x" * size
            self.log[tp].append(
                ConsumerRecord(tp.topic, tp.partition, offset, 0, 0, None, value, None, 0, size, ())
            )


class Harness:
    def __init__(self, **limits: Any) -> None:
        settings = Settings.load(worker={"commit_interval_s": 0.005, **limits})
        self.taken: list[tuple[Any, Lease]] = []
        self.lost: list[Lease] = []
        self.made: list[FakeConsumer] = []
        self.metrics = Metrics()
        self.intake = Intake(settings, self.metrics, Clock(), self.take, Membership(Clock(), 10), self.make)
        self.task = asyncio.create_task(self.intake.run())

    @property
    def consumer(self) -> FakeConsumer:
        return self.made[-1]

    def make(self, **kw: Any) -> FakeConsumer:
        self.made.append(FakeConsumer(**kw))
        return self.made[-1]

    def take(self, record: Any, lease: Lease) -> None:
        lease.on_lost = lambda: self.lose(lease)
        self.taken.append((record, lease))

    def lose(self, lease: Lease) -> None:
        self.lost.append(lease)
        lease.abandon()

    def finish(self, *indexes: int) -> None:
        for i in indexes:
            self.taken[i][1].finish()

    async def polls(self, count: int = 3) -> None:
        target = self.consumer.polls + count
        await until(lambda: self.consumer.polls >= target)
