"""A reader that goes on behind its own position, whatever came in what order and from whichever worker."""

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_client import collect, done, scripted, text_of, tokens
from test_client_order import event

from plait.schemas import Event
from plait.service.client import Client
from plait.service.event_order import Forgotten
from plait.service.positions import Position
from plait.service.response_reader import Inbox

TP = TopicPartition("answers", 3)


def read_all(log: list[Event], inbox: Inbox, start: int = 0) -> list[tuple[Event, Position]]:
    """What an inbox gives out when a partition is read from an offset on, as ResponseReader does."""
    offset, found = start, []
    while offset < len(log):
        try:
            inbox.put(log[offset], TP, offset)
            offset += 1
        except Forgotten:
            offset = inbox.start or 0
        while not inbox.events.empty():
            found.append(inbox.events.get_nowait())
    return found


@st.composite
def logs(draw: Any) -> list[Event]:
    """One request's events as they may lie in a partition: two choices, repeated, early, of workers that took over."""
    texts = [draw(st.text("abcdef", min_size=2, max_size=10)) for _ in range(2)]
    log: list[Event] = []
    known: list[tuple[int, int]] = []  # choice and size by index, as the latest worker knows them
    for epoch in range(1, draw(st.integers(1, 4)) + 1):
        del known[max(0, len(known) - draw(st.integers(0, 3))) :]
        mine = []
        for _ in range(draw(st.integers(0, 5))):
            choice = draw(st.integers(0, 1))
            at = sum(size for c, size in known if c == choice)
            text = texts[choice][at : at + draw(st.integers(1, 4))]
            if text:
                mine.append(event(len(known), text, epoch, choice))
                known.append((choice, len(text)))
        for at in draw(st.lists(st.integers(0, 4), max_size=2)):
            if at + 1 < len(mine):
                mine[at : at + 2] = mine[at + 1], mine[at]
        if mine and draw(st.booleans()):
            mine.append(mine[0])
        log += mine
    return log


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(logs(), st.data())
def test_going_on_gives_what_reading_on_would_have_given(log: list[Event], data: Any) -> None:
    whole = read_all(log, Inbox("r"))
    if not whole:
        return
    cut = data.draw(st.integers(0, len(whole) - 1))
    position = Position.of(whole[cut][1].token())
    assert position == whole[cut][1]
    rest = read_all(log, Inbox.at(position), position.start if position.replay else position.offset)
    assert [e for e, _ in rest] == [e for e, _ in whole[cut + 1 :]]
    assert position.start == 0 and position.delivered == cut + 1


def test_a_position_is_behind_its_event_and_no_further_back_than_it_must() -> None:
    log: list[Event] = [event(0, "a"), event(2, "c"), event(1, "b"), event(3, "d")]
    places = [(p.offset, p.index) for _, p in read_all(log, Inbox("r"))]
    assert places == [(1, 1), (1, 2), (3, 3), (4, 4)], "event 2 lay before event 1"


@pytest.mark.parametrize("token", ["", "x", "WzFd", "é", "WyJ4Il0", "W10"])
def test_what_is_no_token(token: str) -> None:
    with pytest.raises(ValueError, match="resume token"):
        Position.of(token)


def test_a_token_of_another_version() -> None:
    import base64

    with pytest.raises(ValueError, match="version 9"):
        Position.of(base64.urlsafe_b64encode(b"[9]").decode().rstrip("="))


async def test_a_restarted_client_goes_on_in_the_topic_of_the_dead_one(embedded_broker: Any) -> None:
    servers = embedded_broker.bootstrap_servers
    async with scripted(servers) as (client, worker):
        request_id = await client.submit("x")
        request = await worker.request()
        await worker.publish(
            request, tokens(request, 0, "ab"), tokens(request, 1, "c"), tokens(request, 2, "d")
        )
        with pytest.raises(KeyError):
            client.position(request_id)
        seen = ""
        async for each in client.stream(request_id):
            seen += each.text
            if len(seen) >= 3:
                token = client.position(request_id)
                break
        async with Client(servers, per_request_topics=True) as restarted:
            stream = restarted.stream(request_id, resume=token)
            seen += (await asyncio.wait_for(anext(stream), 20)).text
            token = restarted.position(request_id)
            await stream.aclose()
            assert restarted._reader._positions == {}, "what nobody reads is not fetched any more"
        await worker.publish(request, tokens(request, 2, "de", epoch=2), done(request, 3, epoch=2))
        async with Client(servers, per_request_topics=True) as third:
            rest = await asyncio.wait_for(collect(third, request_id, resume=token), 20)
            assert seen + text_of(rest) == "abcde"
            assert [e.index for e in rest] == [3, 4]
            with pytest.raises(ValueError, match="is of request"):
                await collect(third, "another", resume=token)


async def test_behind_the_end_there_is_nothing(embedded_broker: Any) -> None:
    async with scripted(embedded_broker.bootstrap_servers) as (client, worker):
        request_id = await client.submit("x")
        request = await worker.request()
        await worker.publish(request, tokens(request, 0, "a"), done(request, 1))
        async for each in client.stream(request_id):
            if each.type == "done":
                token = client.position(request_id)
        assert client._positions == {}
        assert await collect(client, request_id, resume=token) == []
