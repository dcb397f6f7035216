"""`delivery = "transactional"`: what requests of one input partition publish, and the partition's offsets, in one
transaction after the other.

A channel is a transactional producer of its own, named after group and partition: when the next owner of the partition
opens its one, the broker fences this one and aborts what it had not committed (KIP-98), whatever a frozen worker still
holds. One producer for the worker, fenced by the group's generation (KIP-447), would need fewer; aiokafka sends offsets
without the generation.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import IllegalOperation, KafkaError

from plait.service.kafka import PERMANENT, connection, partition_of, say
from plait.service.membership import Membership
from plait.service.publisher import MAX_REQUEST_BYTES, track
from plait.service.settings import Settings

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
FORGET_S = 60.0


class Channel:
    """The producer of one input partition, always in a transaction. `on_failed` is called once when it can go on no
    more: then the partition has to be taken over anew, from what was committed."""

    def __init__(
        self,
        settings: Settings,
        membership: Membership,
        group: str,
        partition: TopicPartition,
        on_failed: Callable[[], None],
        make_producer: Callable[..., Any] = AIOKafkaProducer,
    ) -> None:
        self._group = group
        self._partition = partition
        self._membership = membership
        self._on_failed = on_failed
        self._producer = make_producer(
            **connection(settings.kafka, f"{partition.topic}-{partition.partition}"),
            transactional_id=f"{group}.{partition.topic}.{partition.partition}",
            # Readers wait for an open transaction: one of a dead worker ends at the next owner, or by this.
            transaction_timeout_ms=2 * settings.kafka.session_timeout_ms + 10_000,
            max_request_size=MAX_REQUEST_BYTES,
            retry_backoff_ms=20,
            partitioner=partition_of,
        )
        self._between = asyncio.Lock()  # held while one transaction ends and the next begins
        self._sending = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._failed = False
        self._ending: asyncio.Task[bool] | None = None
        self._used: OrderedDict[str, float] = OrderedDict()  # topics, by when they were last sent to
        self.refused: dict[bytes | None, str] = {}  # by key: events that a topic will never take
        self.dirty = False

    async def open(self) -> None:
        """Fence the last owner. Raises KafkaError."""
        await self._producer.start()
        await self._producer.begin_transaction()

    async def close(self) -> None:
        """Abort what is not committed."""
        self._failed = True
        if self._ending is not None:
            self._ending.cancel()
            await asyncio.wait([self._ending])
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if self._producer._txn_manager.is_in_transaction():
                    await self._producer.abort_transaction()
                await self._producer.stop()
        except (KafkaError, IllegalOperation, TimeoutError, AssertionError) as error:
            log.info("closing the transactions of %s[%d]: %s", *self._partition, say(error))

    async def send(
        self, topic: str, value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes | None]]
    ) -> tuple[Any, asyncio.Future[Any]]:
        """As Publisher.send; waits while a transaction ends."""
        await self._membership.valid()
        async with self._between:
            self._sending += 1
            self._idle.clear()
        try:
            track(self._producer, topic)
            self._used[topic] = asyncio.get_running_loop().time()
            self._used.move_to_end(topic)
            delivery = await self._producer.send(topic, value, key=key, headers=headers)
        except IllegalOperation as error:
            raise KafkaError(say(error)) from error
        finally:
            self._sending -= 1
            if not self._sending:
                self._idle.set()
        self.dirty = True
        delivery.add_done_callback(lambda future: self._note(key, future))
        return self, delivery

    async def renew(self, failed: Any) -> None:
        """A delivery has failed: nothing of this transaction counts. Does not return; the request is taken from its
        stream and comes again."""
        self.fail("an event was not delivered")
        await asyncio.Future()

    async def commit(self, offset: int, metadata: str) -> bool:
        """End the transaction, with this offset in it, and begin the next one. It goes on when the caller is cancelled,
        for an end that was asked for cannot be taken back; the next call waits for it first."""
        if self._ending is not None:
            await asyncio.wait([self._ending])
        if self._failed:
            return False
        self._ending = ending = asyncio.create_task(self._end(offset, metadata), name="plait-end-transaction")
        # Not `await` or `shield`: `close` cancels it, and that is no cancellation of the caller.
        await asyncio.wait([ending])
        return not ending.cancelled() and ending.result()

    async def _end(self, offset: int, metadata: str) -> bool:
        async with self._between:
            await self._idle.wait()
            try:
                await self._membership.valid()
                await self._producer.flush()
                if self._failed:
                    return False
                await self._producer.send_offsets_to_transaction(
                    {self._partition: (offset, metadata)}, self._group
                )
                await self._producer.commit_transaction()
                self.dirty = False
                self._forget()
                await self._producer.begin_transaction()
            except (KafkaError, IllegalOperation, AssertionError) as error:
                self.fail(say(error))
                return False
        return True

    def _forget(self) -> None:
        """Topics of requests come and go by the thousand; aiokafka would ask for each of them for ever. Not before the
        end of a transaction: nothing waits for a leader then."""
        now = asyncio.get_running_loop().time()
        while self._used and now - next(iter(self._used.values())) > FORGET_S:
            self._producer.client._topics.discard(self._used.popitem(last=False)[0])

    def fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            log.warning("the transaction of %s[%d] is lost: %s", *self._partition, reason)
            self._on_failed()

    def _note(self, key: bytes | None, delivery: asyncio.Future[Any]) -> None:
        error = None if delivery.cancelled() else delivery.exception()
        if error is not None:
            if isinstance(error, PERMANENT):
                self.refused[key] = say(error)
            self.fail(say(error))
