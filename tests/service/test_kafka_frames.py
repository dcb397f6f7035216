"""The relay's reading of Kafka's frames, against aiokafka's encoder in every version that both know."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from aiokafka.protocol import commit, fetch, group, metadata, produce

from plait.service import kafka_frames as frames
from plait.service.kafka_frames import Call


def versions(module: Any, name: str, first: int = 0) -> list[Any]:
    found = [getattr(module, f"{name}_v{v}", None) for v in range(first, 32)]
    return [pytest.param(cls, id=cls.__name__) for cls in found if cls is not None]


def as_call(request: Any) -> Call:
    header = struct.pack(">hhi", request.API_KEY, request.API_VERSION, 7) + b"\0\1x"
    return Call.read(header + request.encode())


@pytest.mark.parametrize("cls", versions(produce, "ProduceRequest"))
def test_a_produce_request_gives_its_acks_and_topics(cls: Any) -> None:
    topics = [("a", [(0, b"records"), (1, b"")]), ("b", [(0, b"more")])]
    fields = (1, 1000, topics) if cls.API_VERSION < 3 else (None, 1, 1000, topics)
    call = as_call(cls(*fields))
    assert call.understood
    assert frames.produced(call) == (1, {"a", "b"})


@pytest.mark.parametrize("cls", versions(fetch, "FetchRequest"))
def test_a_fetch_request_gives_its_wait_and_topics(cls: Any) -> None:
    request = fetch.FetchRequest(250, 1, 1 << 20, 0, [("a", [(0, 5, 1 << 20), (1, 6, 1 << 20)]), ("b", [])])
    call = as_call(request.build(cls))
    assert call.understood
    assert frames.fetched(call) == (0.25, {"a", "b"})


def fetch_answer(cls: Any, error: int, records: bytes | None) -> bytes:
    version = cls.API_VERSION
    partition: tuple[Any, ...] = (0, error, 10)
    partition += (9,) if version >= 4 else ()
    partition += (0,) if version >= 5 else ()
    partition += ([(1, 2), (3, 4)],) if version >= 4 else ()
    partition += (-1,) if version >= 11 else ()
    quiet = (*partition[:1], 0, *partition[2:], b"")
    head = (0,) if version >= 1 else ()
    head += (0, 0) if version >= 7 else ()
    return struct.pack(">i", 7) + cls(*head, [("a", [quiet, (*partition, records)])]).encode()


@pytest.mark.parametrize("cls", versions(fetch, "FetchResponse"))
def test_only_a_fetch_response_without_records_and_errors_found_nothing(cls: Any) -> None:
    assert frames.found_nothing(fetch_answer(cls, 0, b""), cls.API_VERSION)
    assert frames.found_nothing(fetch_answer(cls, 0, None), cls.API_VERSION)
    assert not frames.found_nothing(fetch_answer(cls, 0, b"record"), cls.API_VERSION)
    assert not frames.found_nothing(fetch_answer(cls, 1, b""), cls.API_VERSION)


@pytest.mark.parametrize("cls", versions(group, "JoinGroupResponse"))
def test_a_join_gives_generation_and_member(cls: Any) -> None:
    head = (0,) if cls.API_VERSION >= 2 else ()
    answer = struct.pack(">i", 7) + cls(*head, 0, 3, "range", "leader", "member", []).encode()
    assert frames.joined(answer, cls.API_VERSION) == (0, 3, "member")


@pytest.mark.parametrize("cls", versions(commit, "OffsetCommitResponse"))
def test_only_a_stale_generation_becomes_a_rebalance(cls: Any) -> None:
    def answer(code: int) -> bytes:
        head = (0,) if cls.API_VERSION >= 3 else ()
        body = cls(*head, [("a", [(0, 0), (1, code)]), ("b", [(22, 25)])]).encode()
        return struct.pack(">i", 7) + body

    assert frames.as_rebalance(answer(22), cls.API_VERSION) == answer(27)
    assert frames.as_rebalance(answer(25), cls.API_VERSION) == answer(25)


@pytest.mark.parametrize("cls", versions(metadata, "MetadataRequest", first=4))
def test_asking_about_a_topic_does_not_make_it(cls: Any) -> None:
    for topics in (["a", "b"], [], None):
        call = as_call(cls(topics, True))
        assert frames.without_creation(call) == as_call(cls(topics, False)).frame


def test_versions_that_are_not_understood_are_not_offered() -> None:
    def offers(newest: int) -> bytes:
        return struct.pack(">ihi", 7, 0, 2) + struct.pack(">hhhhhh", frames.FETCH, 0, newest, 99, 0, newest)

    assert frames.limit_versions(offers(13)) == offers(13).replace(
        struct.pack(">hhh", frames.FETCH, 0, 13), struct.pack(">hhh", frames.FETCH, 0, 11)
    )
    assert frames.limit_versions(offers(4)) == offers(4)


def test_the_broker_s_address_becomes_the_relay_s() -> None:
    answer = b"\0\x09127.0.0.1" + struct.pack(">i", 4000) + b"rest"
    assert frames.move(answer, 4000, 5000) == b"\0\x09127.0.0.1" + struct.pack(">i", 5000) + b"rest"
