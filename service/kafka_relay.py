"""Stands between Kafka clients and the embedded broker and adds what that broker leaves out.

- A fetch that finds nothing waits, up to the client's `max_wait_ms`, until somebody produces to one of its
  topics (the broker answers at once, so that an idle consumer would ask thousands of times a second).
- A group member that is silent for its session timeout is made to leave, so that a killed consumer does not
  block its group.
- A commit of a current member during a rebalance gets REBALANCE_IN_PROGRESS, as from Kafka, and not
  ILLEGAL_GENERATION, which makes clients forget who they are.
- A topic is made only by who asks to make it: asking about a removed topic does not bring it back.

All other bytes pass through as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
from dataclasses import dataclass

from plait.service import kafka_frames as frames
from plait.service.kafka_frames import Call

log = logging.getLogger(__name__)

LARGEST_FRAME = 100 << 20
EVICTION_PERIOD = 0.25


@dataclass
class Member:
    """A consumer in a group: what it was told, and when it must have spoken again (monotonic seconds)."""

    generation: int
    session_timeout: float
    expires: float

    def alive(self) -> None:
        self.expires = time.monotonic() + self.session_timeout


class Connection:
    """A stream of frames, each behind its length."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, frame: bytes) -> None:
        self.writer.write(struct.pack(">i", len(frame)) + frame)
        await self.writer.drain()

    async def receive(self) -> bytes:
        (length,) = struct.unpack(">i", await self.reader.readexactly(4))
        if not 0 <= length <= LARGEST_FRAME:
            raise ConnectionError(f"a frame of {length} bytes")
        return await self.reader.readexactly(length)

    async def call(self, frame: bytes) -> bytes:
        await self.send(frame)
        return await self.receive()


class Relay:
    """Listens on `port` (0: a free one) of the loopback interface for the broker behind port `behind`.

    `fetches` counts the fetches that the broker was asked for.
    """

    def __init__(self, behind: int, port: int) -> None:
        self.behind = behind
        self.port = port
        self.fetches = 0
        self._waiting: dict[asyncio.Future[None], set[str]] = {}
        self._members: dict[tuple[str, str], Member] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Begin to listen; returns the port. Raises OSError when it is taken."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self._hold(asyncio.create_task(self._evict()))
        return self.port

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _hold(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._hold(asyncio.create_task(self._serve(Connection(reader, writer))))

    async def _serve(self, client: Connection) -> None:
        broker = None
        try:
            broker = await self._connect()
            while True:
                call = Call.read(await client.receive())
                answer = await self._answer(call, broker)
                if answer is not None:
                    await client.send(answer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        except (struct.error, UnicodeDecodeError):
            log.warning("a client of the embedded broker sent what is not Kafka's protocol")
        finally:
            client.writer.close()
            if broker is not None:
                broker.writer.close()

    async def _connect(self) -> Connection:
        return Connection(*await asyncio.open_connection("127.0.0.1", self.behind))

    async def _answer(self, call: Call, broker: Connection) -> bytes | None:
        if call.understood:
            match call.api:
                case frames.PRODUCE:
                    return await self._produce(call, broker)
                case frames.FETCH:
                    return await self._fetch(call, broker)
                case frames.JOIN_GROUP:
                    return await self._join(call, broker)
                case frames.HEARTBEAT | frames.SYNC_GROUP | frames.OFFSET_COMMIT:
                    return await self._member_call(call, broker)
                case frames.METADATA:
                    call.frame = frames.without_creation(call)
                case frames.LEAVE_GROUP:
                    body = call.reader()
                    self._members.pop((body.string(), body.string()), None)
        answer = await broker.call(call.frame)
        match call.api:
            case frames.END_TXN:
                self._wake(None)
            case frames.METADATA | frames.FIND_COORDINATOR | frames.DESCRIBE_CLUSTER:
                return frames.move(answer, self.behind, self.port)
            case frames.API_VERSIONS:
                return frames.limit_versions(answer)
        return answer

    async def _produce(self, call: Call, broker: Connection) -> bytes | None:
        acks, topics = frames.produced(call)
        if acks == 0:
            await broker.send(call.frame)
            answer = None
        else:
            answer = await broker.call(call.frame)
        self._wake(topics)
        return answer

    async def _fetch(self, call: Call, broker: Connection) -> bytes:
        wait, topics = frames.fetched(call)
        deadline = time.monotonic() + wait
        while True:
            self.fetches += 1
            news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[news] = topics
            try:
                answer = await broker.call(call.frame)
                left = deadline - time.monotonic()
                if left <= 0 or not frames.found_nothing(answer, call.version):
                    return answer
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news, left)
            finally:
                del self._waiting[news]

    def _wake(self, topics: set[str] | None) -> None:
        """Let the fetches that wait for one of these topics (None: for any) look again."""
        for news, wanted in self._waiting.items():
            if not news.done() and (topics is None or topics & wanted):
                news.set_result(None)

    async def _join(self, call: Call, broker: Connection) -> bytes:
        body = call.reader()
        group, session_timeout = body.string(), body.i32() / 1000
        if call.version >= 1:
            body.i32()  # rebalance timeout
        known = self._members.get((group, body.string()))
        if known is not None:
            known.expires = float("inf")  # until the group is complete, which may take long
        try:
            answer = await broker.call(call.frame)
        finally:
            if known is not None:
                known.alive()
        error, generation, member_id = frames.joined(answer, call.version)
        if error == 0:
            member = self._members[group, member_id] = Member(generation, session_timeout, 0)
            member.alive()
        return answer

    async def _member_call(self, call: Call, broker: Connection) -> bytes:
        body = call.reader()
        group = body.string()
        if call.api == frames.OFFSET_COMMIT and call.version == 0:
            return await broker.call(call.frame)
        generation = body.i32()
        member = self._members.get((group, body.string()))
        answer = await broker.call(call.frame)
        if member is not None:
            member.alive()
            if call.api == frames.OFFSET_COMMIT and generation == member.generation:
                return frames.as_rebalance(answer, call.version)
        return answer

    async def _evict(self) -> None:
        while True:
            await asyncio.sleep(EVICTION_PERIOD)
            now = time.monotonic()
            for key, member in list(self._members.items()):
                if member.expires < now:
                    del self._members[key]
                    log.info(
                        "member %s of group %s was silent for its session timeout: it leaves", *key[::-1]
                    )
                    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                        await self._make_leave(*key)

    async def _make_leave(self, group: str, member_id: str) -> None:
        broker = await self._connect()
        try:
            await broker.call(frames.leave(group, member_id))
        finally:
            broker.writer.close()
