"""Reads and corrects the few Kafka requests and responses that the relay of the embedded broker looks into.

Formats are those of the Kafka protocol guide, in the versions before the "flexible" ones (KIP-482).
Malformed bytes raise struct.error or UnicodeDecodeError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

PRODUCE, FETCH, METADATA, OFFSET_COMMIT, FIND_COORDINATOR = 0, 1, 3, 8, 10
JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP = 11, 12, 13, 14
API_VERSIONS, END_TXN, DESCRIBE_CLUSTER = 18, 26, 60

# The newest version of each call that is understood here.
NEWEST = {
    **{PRODUCE: 8, FETCH: 11, METADATA: 8, OFFSET_COMMIT: 7},
    **{JOIN_GROUP: 5, HEARTBEAT: 3, LEAVE_GROUP: 2, SYNC_GROUP: 3},
}

ILLEGAL_GENERATION = 22
REBALANCE_IN_PROGRESS = 27


class Reader:
    """Walks over a frame."""

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data = data
        self.position = position

    def take(self, fmt: str) -> int:
        (value,) = struct.unpack_from(fmt, self.data, self.position)
        self.position += struct.calcsize(fmt)
        return int(value)

    def i8(self) -> int:
        return self.take(">b")

    def i16(self) -> int:
        return self.take(">h")

    def i32(self) -> int:
        return self.take(">i")

    def i64(self) -> int:
        return self.take(">q")

    def count(self) -> range:
        """For looping over an array; null is read as empty."""
        return range(self.i32())

    def string(self) -> str:
        """A string; null is read as empty."""
        length = max(self.i16(), 0)
        self.position += length
        return self.data[self.position - length : self.position].decode()

    def blob(self) -> int:
        """Skip a byte string and return its length; null is read as empty."""
        length = max(self.i32(), 0)
        self.position += length
        return length


@dataclass
class Call:
    """A request, its header read."""

    frame: bytes
    api: int
    version: int
    body: int

    @classmethod
    def read(cls, frame: bytes) -> Call:
        header = Reader(frame)
        api, version, _ = header.i16(), header.i16(), header.i32()
        header.string()
        return cls(frame, api, version, header.position)

    @property
    def understood(self) -> bool:
        return self.version <= NEWEST.get(self.api, -1)

    def reader(self) -> Reader:
        return Reader(self.frame, self.body)


def produced(call: Call) -> tuple[int, set[str]]:
    """The acks and the topics of a produce request."""
    body = call.reader()
    if call.version >= 3:
        body.string()  # transactional id
    acks, _timeout = body.i16(), body.i32()
    topics = set()
    for _ in body.count():
        topics.add(body.string())
        for _ in body.count():
            body.i32()
            body.blob()
    return acks, topics


def fetched(call: Call) -> tuple[float, set[str]]:
    """The longest wait, in seconds, and the topics of a fetch request."""
    version, body = call.version, call.reader()
    _replica, wait, _min_bytes = body.i32(), body.i32() / 1000, body.i32()
    if version >= 3:
        body.i32()  # most bytes
    if version >= 4:
        body.i8()  # isolation
    if version >= 7:
        body.i64()  # session and its epoch
    topics = set()
    for _ in body.count():
        topics.add(body.string())
        for _ in body.count():
            body.i32()
            body.position += 4 if version >= 9 else 0  # leader epoch
            body.i64()
            body.position += 8 if version >= 5 else 0  # log start
            body.i32()
    return wait, topics


def found_nothing(answer: bytes, version: int) -> bool:
    """Whether a fetch response has neither a record nor an error."""
    body = Reader(answer, 4)
    if version >= 1:
        body.i32()  # throttle
    if version >= 7:
        if body.i16() != 0:
            return False
        body.i32()  # session
    for _ in body.count():
        body.string()
        for _ in body.count():
            _partition, error, _high_watermark = body.i32(), body.i16(), body.i64()
            body.position += 8 if version >= 4 else 0  # last stable offset
            body.position += 8 if version >= 5 else 0  # log start
            if version >= 4:
                for _ in body.count():  # aborted transactions
                    body.position += 16
            body.position += 4 if version >= 11 else 0  # preferred replica
            if error != 0 or body.blob() > 0:
                return False
    return True


def joined(answer: bytes, version: int) -> tuple[int, int, str]:
    """The error, the generation and the member's id of a response to a join."""
    body = Reader(answer, 8 if version >= 2 else 4)
    error, generation = body.i16(), body.i32()
    _protocol, _leader = body.string(), body.string()
    return error, generation, body.string()


def as_rebalance(answer: bytes, version: int) -> bytes:
    """The response to a commit, with REBALANCE_IN_PROGRESS in place of ILLEGAL_GENERATION."""
    changed = bytearray(answer)
    for position in commit_errors(Reader(answer, 8 if version >= 3 else 4)):
        if struct.unpack_from(">h", answer, position) == (ILLEGAL_GENERATION,):
            struct.pack_into(">h", changed, position, REBALANCE_IN_PROGRESS)
    return bytes(changed)


def commit_errors(body: Reader) -> Iterator[int]:
    for _ in body.count():
        body.string()
        for _ in body.count():
            body.i32()
            yield body.position
            body.i16()


def without_creation(call: Call) -> bytes:
    """A metadata request that forbids making the topics it asks about (from version 4 on it can say so)."""
    if call.version < 4:
        return call.frame
    body = call.reader()
    for _ in body.count():
        body.string()
    return call.frame[: body.position] + b"\0" + call.frame[body.position + 1 :]


def limit_versions(answer: bytes) -> bytes:
    """The response to ApiVersions, with the calls that are read here limited to what is understood."""
    for api, newest in NEWEST.items():
        for offered in range(newest + 1, 32):
            answer = answer.replace(struct.pack(">hhh", api, 0, offered), struct.pack(">hhh", api, 0, newest))
    return answer


def move(answer: bytes, old: int, new: int) -> bytes:
    """A response with the broker's address on the loopback interface moved to another port."""
    return answer.replace(address(old), address(new))


def address(port: int) -> bytes:
    return b"127.0.0.1" + struct.pack(">i", port)


def leave(group: str, member_id: str) -> bytes:
    """A request (LeaveGroup version 0) that makes a member leave its group."""
    frame = struct.pack(">hhih", LEAVE_GROUP, 0, 0, -1)
    for text in (group.encode(), member_id.encode()):
        frame += struct.pack(">h", len(text)) + text
    return frame
