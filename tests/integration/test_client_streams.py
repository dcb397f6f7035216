"""Hundreds of streams over one consumer, and readers that restart in the middle of theirs."""

import asyncio

import pytest
from aiokafka import TopicPartition

from fakes import FakeEngine, FakeTokenizer, fake_tokens
from kafka_broker import KafkaBroker
from plait.engine.api import GenerationRequest, SamplingParams
from plait.schemas import TokensEvent
from plait.schemas.names import RESPONSES_PREFIX
from plait.service import client as client_module
from plait.service.client import Client, RequestFailed
from worker_harness import Site

pytestmark = pytest.mark.kafka


def client_of(site: Site, **options: object) -> Client:
    topics = {"requests_topic": site.topics.requests, "control_topic": site.topics.control}
    return Client(site.bootstrap_servers, **topics, **options)  # type: ignore[arg-type]


def expected(prompt: str, count: int) -> list[int]:
    sampling = SamplingParams(max_tokens=count, seed=1)
    return fake_tokens(GenerationRequest("", FakeTokenizer().encode(prompt), sampling))


async def test_hundreds_of_streams_over_one_consumer(kafka: KafkaBroker) -> None:
    site = Site(kafka.bootstrap_servers, worker={"max_in_flight": 400})
    count, tokens = 400, 12
    async with site.worker(FakeEngine(pace=0.01, max_running=count)), client_of(site) as client:

        async def ask(number: int) -> tuple[list[int], list[int]]:
            prompt = f"stream number {number}"
            request_id = await client.submit(prompt, max_tokens=tokens, seed=1)
            events = [event async for event in client.stream(request_id, timeout_s=90)]
            ids = [token for e in events if isinstance(e, TokensEvent) for token in e.token_ids]
            assert [e.index for e in events] == list(range(len(events))) and events[-1].type == "done"
            return ids, expected(prompt, tokens)

        for ids, wanted in await asyncio.gather(*map(ask, range(count))):
            assert ids == wanted
        assert client._reader._inboxes == {} and client._positions == {}


async def test_readers_that_restart_go_on_where_they_were(kafka: KafkaBroker) -> None:
    """The first client dies in the middle of all streams; tokens are all that is left of it."""
    site = Site(kafka.bootstrap_servers)
    shared = f"{site.name}.answers"
    await site.create(shared, 3)
    count, tokens = 50, 40
    first = client_of(site, response_topic=shared)
    async with site.worker(FakeEngine(pace=0.02)):
        await first.start()
        prompts = [f"stream number {number}" for number in range(count)]
        ids = await asyncio.gather(*(first.submit(p, max_tokens=tokens, seed=1) for p in prompts))
        seen: dict[str, list[int]] = {request_id: [] for request_id in ids}
        kept: dict[str, str] = {}

        async def read(client: Client, request_id: str, enough: int | None) -> None:
            async for event in client.stream(request_id, timeout_s=90, resume=kept.get(request_id)):
                if isinstance(event, TokensEvent):
                    seen[request_id] += event.token_ids
                kept[request_id] = client.position(request_id)
                if enough is not None and len(seen[request_id]) >= enough:
                    return

        await asyncio.gather(*(read(first, r, 1 + number % 20) for number, r in enumerate(ids)))
        await first._reader.stop()
        async with client_of(site, response_topic=shared) as second:
            await asyncio.gather(*(read(second, request_id, None) for request_id in ids))
        await first.close()
    assert [seen[r] for r in ids] == [expected(p, tokens) for p in prompts]


async def test_a_client_whose_topic_is_not_open_hears_so(
    kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_ELSEWHERE_S", 0.2)
    site = Site(
        kafka.bootstrap_servers,
        topics={"named_responses": "answers[.].+", "responses_prefix": RESPONSES_PREFIX},
    )
    async with site.worker(), client_of(site) as client:
        for _ in range(2):
            with pytest.raises(RequestFailed, match=r"topics\.named_responses") as refusal:
                await client.generate("hello", timeout_s=30)
            assert refusal.value.code == "invalid_request"
        assert list(client._reader._positions) == [TopicPartition(client.response_topic, 0)]
