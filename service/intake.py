"""Reads requests from Kafka: bounded read-ahead, leases, commits of finished prefixes, rebalances."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import ConsumerStoppedError, KafkaError

from plait.service import positioning
from plait.service.clock import Clock
from plait.service.commits import COMMIT_TIMEOUT_S, Commits
from plait.service.handover import Takeovers
from plait.service.kafka import connection, say, step
from plait.service.leases import Lease, Partition
from plait.service.membership import Membership
from plait.service.metrics import Metrics
from plait.service.read_ahead import ReadAhead
from plait.service.rebalances import Rebalances
from plait.service.settings import LaneSettings, Settings

log = logging.getLogger(__name__)

POLL_MS = 200
RETRY_BACKOFF_S = 1.0
MAX_FAILED_POLLS = 5
POLL_RECORDS = 64  # at a time: other lanes and running requests have their turn in between
FETCH_MAX_BYTES = 50 * 1024 * 1024  # of one answer of a broker

OnRecord = Callable[[Any, Lease], None]


class Intake:
    """Reads one lane, as one member of its consumer group.

    `read_ahead` says how many requests may be out at a time; their bytes may exceed its limit by the last of
    them. Partitions are paused meanwhile, and the group keeps us. A lane has a consumer of its own, so that
    what one lane fetches never stands before another's, and its pauses cost no other lane what it had fetched.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        clock: Clock,
        on_record: OnRecord,
        membership: Membership,
        make_consumer: Callable[..., Any] = AIOKafkaConsumer,
        lane: LaneSettings | None = None,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        lanes = settings.topics.all_lanes()
        self.lane = lane or lanes[0]
        self._read_ahead = read_ahead or ReadAhead(settings.worker, lanes)
        self._read_ahead.listen(self._freed)
        self._settings = settings
        self._limits = settings.worker
        self._metrics = metrics
        self._clock = clock
        self._on_record = on_record
        self._membership = membership
        self._make_consumer = make_consumer
        self._consumer: Any = None
        self._partitions: dict[TopicPartition, Partition] = {}
        self._orphans: dict[TopicPartition, Partition] = {}  # of topics that are gone
        self._member: tuple[str, int] = ("", -1)
        self.commits = Commits(metrics, settings.worker, self._recorded)
        self._tasks: set[asyncio.Task[None]] = set()
        self._takeovers = Takeovers(settings, membership, self._owned, self._opened, self._give_up)
        self._draining = False
        self._closed = False
        self._room = asyncio.Event()  # something was resumed
        self._careful = False  # while a record that cannot be decoded is looked for
        self._astray = False  # with that error aiokafka loses what it had drained of other partitions
        self._held: set[TopicPartition] = set()
        self._polled = clock.monotonic()
        self.assigned = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Requests of this lane that are read and not yet answered."""
        return self._read_ahead.requests(self.lane.name)

    @property
    def in_flight_bytes(self) -> int:
        return self._read_ahead.bytes(self.lane.name)

    async def run(self) -> None:
        """Poll until `close`. Recovers from every failure of the broker, and says so."""
        self._spawn(self.commits.run(), "plait-commit")
        failed = 0
        while not self._closed:
            try:
                if self._consumer is None:
                    await self._open()
                self._balance()
                batch = await (self._poll_carefully() if self._careful else self._poll())
                failed = 0
            except positioning.Astray as error:
                await self._find_position(error)
                continue
            except (KafkaError, ConsumerStoppedError, OSError) as error:
                failed += 1
                log.warning("reading requests, trying again: %s", say(error))
                await asyncio.sleep(RETRY_BACKOFF_S)
                if failed >= MAX_FAILED_POLLS and not self._closed:
                    failed = 0
                    await self._reopen()
                continue
            self._polled = self._clock.monotonic()
            for tp, records in batch.items():
                await self._take_all(tp, records)

    async def _find_position(self, error: Exception) -> None:
        """Raises positioning.OutOfRange when the policy is to fail."""
        try:
            policy = self._settings.kafka.on_out_of_range
            found = await positioning.find(self._consumer, error, policy, self._metrics)
        except (KafkaError, OSError) as second:
            log.warning("looking for the position to read from, trying again: %s", say(second))
            await asyncio.sleep(RETRY_BACKOFF_S)
            return
        for tp, offset in found.items():
            partition = self._partitions.get(tp)
            if partition is not None and offset < (partition.tracker.next or 0):
                self._begin_anew(partition)  # another log, whose offsets say nothing of those delivered
            if self._consumer._subscription.is_assigned(tp):
                self._consumer.seek(tp, offset)

    def _begin_anew(self, partition: Partition) -> None:
        """What is in flight is still answered: its records are gone, and nobody else will."""
        if partition.channel is not None:
            self._takeovers.reclaim(self._consumer, partition)
            return
        self._finish_orphans(partition)
        fresh = self._partitions[partition.topic_partition] = Partition(
            partition.topic_partition, partition.epoch
        )
        self._takeovers.begin(self._consumer, [fresh])

    def _finish_orphans(self, partition: Partition) -> None:
        """Also start what waits for a commit that will not come."""
        partition.reach = sys.maxsize
        self._start(partition)

    async def _poll(self) -> dict[TopicPartition, list[Any]]:
        free = self._consumer.assignment() - self._held
        if self._held and not free:
            return await self._hold()
        asked = min(POLL_RECORDS, max(1, self._read_ahead.room(self.lane.name)))
        # Polling a paused partition throws away what was fetched of it.
        only = free if self._held else ()
        try:
            batch = await self._consumer.getmany(*only, timeout_ms=POLL_MS, max_records=asked)
        except UnicodeDecodeError:
            self._careful = self._astray = True
            return {}
        self._read_ahead.want(self.lane.name, sum(map(len, batch.values())) >= asked)
        return batch  # type: ignore[no-any-return]

    async def _take_all(self, tp: TopicPartition, records: list[Any]) -> None:
        """Take what was polled, as far as there still is room: another lane may have taken it meanwhile."""
        partition = self._partitions.get(tp)
        for record in records:
            while not self._read_ahead.room(self.lane.name) and not self._draining:
                self._balance()
                await self._hold()
            if self._partitions.get(tp) is not partition:
                return  # another assignment, to which these will be delivered again
            self._take(record)

    async def _hold(self) -> dict[TopicPartition, list[Any]]:
        """Wait for room instead of polling, and count as polling with the group."""
        self._polled = self._clock.monotonic()
        self._room.clear()
        with self._consumer._subscription.fetch_context():
            try:
                async with asyncio.timeout(POLL_MS / 1000):
                    await self._room.wait()
            except TimeoutError:
                pass
        return {}

    async def _rewind(self) -> None:
        """Back to what was taken last."""
        for tp in self._consumer.assignment() & self._partitions.keys():
            offset = self._partitions[tp].tracker.next
            if offset is None:
                offset = await self._consumer.committed(tp) or 0  # one that is gone: from the beginning
            self._consumer.seek(tp, offset)

    async def _poll_carefully(self) -> dict[TopicPartition, list[Any]]:
        if self._astray:
            await self._rewind()
            self._astray = False
        batch, found = await step(self._consumer, POLL_MS)
        self._careful = not found
        if not batch:
            await asyncio.sleep(POLL_MS / 1000)
        return batch

    def stop_reading(self) -> None:
        """Take no further request; polling goes on, so that what is in flight can still be committed."""
        self._draining = True
        self._balance()

    async def close(self) -> None:
        """Commit what is finished and leave the group."""
        self._draining = True
        async with self.commits.busy:  # not in the middle of one
            for task in self._tasks:
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._consumer is not None:
            await self.commits.commit(clean=True)
            self._closed = True
            channels = [p.channel.close() for p in self._partitions.values() if p.channel is not None]
            await asyncio.gather(*channels)
            await self._consumer.stop()
        self._takeovers.cancel()
        self._closed = True

    def stalled(self, seconds: float) -> bool:
        """Whether polling has stood still for so long although no rebalance is going on."""
        waiting = self._consumer is None or self._consumer._subscription.reassignment_in_progress
        return not waiting and self._clock.monotonic() - self._polled > seconds

    def reads_with(self, consumer: Any) -> bool:
        return self._consumer is consumer

    async def revoked(self, revoked: set[TopicPartition]) -> None:
        """Commit; what becomes of the requests in flight is known only with the next assignment."""
        if not self._member[0]:
            self._membership.listen(self._consumer._coordinator)
        self.assigned.clear()
        if revoked and self._settings.kafka.commit_on_revoke:
            limit = min(COMMIT_TIMEOUT_S, self._settings.kafka.session_timeout_ms / 3000)
            await self.commits.commit(clean=True, limit_s=limit)

    async def reassigned(self, assigned: set[TopicPartition]) -> None:
        """Keep what stayed ours, drop what went.

        A partition stayed ours without a break when we are the same member, one generation on: nobody else
        can have had it. Then its requests in flight go on, and their second delivery is recognised.
        """
        coordinator = self._consumer._coordinator
        member, generation = coordinator.member_id, coordinator.generation
        unbroken = member == self._member[0] and generation <= self._member[1] + 1
        self._member = (member, generation)
        before, now = self._partitions, {}
        for partition in assigned:
            kept = before.pop(partition, None) if unbroken else None
            if kept is not None:
                kept.epoch = generation
                self._forget_waiting(kept)  # it comes again, as all that is not committed
            now[partition] = kept or Partition(partition, generation)
        self._set_partitions(now)
        for tp, lost in before.items():
            if lost.channel is None and self._consumer.partitions_for_topic(tp.topic) is None:
                log.error("%s is gone: %d of its requests are in flight", tp.topic, len(lost.leases))
                self._finish_orphans(lost)
                self._orphans[tp] = lost
            else:
                self._lose(lost)
        self._membership.settled(coordinator)
        if new := [p for p in now.values() if not p.is_open and not p.is_opening]:
            self._takeovers.begin(self._consumer, new)
        self._metrics.rebalances.inc()
        self._metrics.assigned.labels(lane=self.lane.name).set(len(assigned))
        log.info(
            "%s, generation %d: %d partitions assigned, %d lost, %d requests in flight",
            self.lane.topic,
            generation,
            len(assigned),
            len(before),
            self.in_flight,
        )
        self._balance()
        self.assigned.set()

    def _set_partitions(self, partitions: dict[TopicPartition, Partition]) -> None:
        self._partitions = self.commits.partitions = partitions

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _owned(self) -> dict[TopicPartition, Partition]:
        return self._partitions

    def _give_up(self, partition: Partition, fresh: Partition) -> None:
        """Begin anew with a partition that stays ours."""
        self._lose(partition)
        self._partitions[partition.topic_partition] = fresh

    def _opened(self, partition: Partition) -> None:
        orphan = self._orphans.pop(partition.topic_partition, None)
        if orphan is not None and partition.tracker.position is not None:
            # The group's offsets would have gone with the topic: it was only not to be seen, and they come again.
            self._lose(orphan)
        self._start(partition)
        self._balance()

    def _forget_waiting(self, partition: Partition) -> None:
        while partition.waiting:
            self._read_ahead.give_back(self.lane.name, _size(partition.waiting.popleft()))

    def _lose(self, partition: Partition) -> None:
        self._metrics.lag.clear()  # a lost partition would keep its last value; the others are set again soon
        self._forget_waiting(partition)
        if partition.channel is not None:
            self._spawn(partition.channel.close(), "plait-close-transactions")
        for lease in list(partition.leases.values()):
            if lease.on_lost is not None:
                lease.on_lost()

    def _take(self, record: Any) -> None:
        partition = self._partitions.get(TopicPartition(record.topic, record.partition))
        if partition is None or self._draining:
            return
        if not partition.is_open and self._limits.delivery == "transactional":
            return  # reading begins again where the last owner was found to be
        partition.waiting.append(record)
        self._read_ahead.take(self.lane.name, _size(record))
        self._start(partition)

    def _start(self, partition: Partition) -> None:
        """Hand on what waits, as far as a commit says that it may have been started. What still waits then
        holds its partition."""
        while partition.is_open and partition.waiting and not self._draining:
            record = partition.waiting[0]
            if record.offset >= partition.reach:
                self.commits.soon()
                return
            partition.waiting.popleft()
            self._admit(partition, record)

    def _recorded(self) -> None:
        """A commit is durable: its reservations hold."""
        for partition in self._partitions.values():
            self._start(partition)
        self._freed()
        self._observe_lag()

    def _admit(self, partition: Partition, record: Any) -> None:
        if not partition.tracker.deliver(record.offset):
            log.debug("%s[%d]@%d was delivered before", record.topic, record.partition, record.offset)
            self._read_ahead.give_back(self.lane.name, _size(record))
            return
        self._observe()
        lease = Lease(partition, record.offset, _size(record), self._ended, self.commits.recorded)
        self._on_record(record, lease)

    def _ended(self, lease: Lease) -> None:
        self._read_ahead.give_back(self.lane.name, lease.size)
        self._observe()

    def _freed(self) -> None:
        if self._held:
            self._balance()

    def _observe(self) -> None:
        self._metrics.in_flight.labels(lane=self.lane.name).set(self.in_flight)
        self._metrics.in_flight_bytes.labels(lane=self.lane.name).set(self.in_flight_bytes)

    def _balance(self) -> None:
        """Pause or resume all assigned partitions by what is in flight."""
        if self._consumer is None:
            return
        assigned, paused = self._consumer.assignment(), self._consumer.paused()
        full = self._read_ahead.room(self.lane.name) == 0
        if full or not assigned:
            self._read_ahead.want(self.lane.name, full and bool(assigned))
        if full or self._draining:
            self._held = set(assigned)
        else:
            window = self._limits.max_window
            shut = {tp for tp, p in self._partitions.items() if p.waiting or p.tracker.window >= window}
            self._held = shut & assigned
        self._consumer.pause(*(self._held - paused))
        self._consumer.resume(*(paused - self._held))
        self._metrics.paused.labels(lane=self.lane.name).set(len(self._held))
        if len(self._held) < len(assigned):
            self._room.set()

    def _observe_lag(self) -> None:
        consumer = self._consumer
        if consumer is None:
            return
        for tp, partition in self._partitions.items():
            if consumer._subscription.is_assigned(tp):
                end, position = consumer.highwater(tp), partition.tracker.position
                if end is not None and position is not None:
                    self._metrics.lag.labels(tp.topic, tp.partition).set(max(0, end - position))

    async def _open(self) -> None:
        kafka, lane = self._settings.kafka, self.lane
        # aiokafka keeps the sticky assignor's memory in the class: each consumer needs a class of its own.
        assignor = type("Sticky", (StickyPartitionAssignor,), {})
        consumer = self._make_consumer(
            **connection(kafka, f"requests-{lane.name}"),
            group_instance_id=kafka.group_instance_id,
            group_id=self._settings.topics.group_of(lane.topic, kafka.group_id),
            enable_auto_commit=False,
            auto_offset_reset="none",  # see positioning.py
            isolation_level="read_committed",
            partition_assignment_strategy=(assignor,),
            session_timeout_ms=kafka.session_timeout_ms,
            heartbeat_interval_ms=kafka.heartbeat_interval_ms,
            rebalance_timeout_ms=max(kafka.session_timeout_ms, 10_000),
            max_poll_interval_ms=kafka.max_poll_interval_ms,
            fetch_max_wait_ms=kafka.fetch_max_wait_ms,
            metadata_max_age_ms=kafka.metadata_max_age_ms,
            fetch_max_bytes=min(FETCH_MAX_BYTES, self._read_ahead.byte_limit(lane.name)),
        )
        consumer.subscribe([lane.topic], listener=Rebalances(self, consumer))
        # The listener needs it while start() still waits for an assignment.
        self._consumer = self.commits.consumer = consumer
        try:
            await consumer.start()
        except BaseException:
            self._consumer = self.commits.consumer = None
            await consumer.stop()
            raise

    async def _reopen(self) -> None:
        """A new consumer, after one whose background tasks have died."""
        log.warning("reading requests failed %d times in a row: joining the group anew", MAX_FAILED_POLLS)
        consumer, self._consumer = self._consumer, None
        self.commits.consumer = None
        lost = self._partitions
        self._set_partitions({})
        self._member = ("", -1)
        self.assigned.clear()
        for partition in lost.values():
            self._lose(partition)
        self._takeovers.cancel()
        if consumer is not None:
            self._membership.leave(consumer._coordinator)
            try:
                async with asyncio.timeout(COMMIT_TIMEOUT_S):
                    await consumer.stop()
            except Exception as error:
                log.warning("closing the old consumer: %s", say(error))


def _size(record: Any) -> int:
    return len(record.value or b"") + len(record.key or b"")
