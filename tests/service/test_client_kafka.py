"""The client against a real Apache Kafka."""

import asyncio

import pytest
from test_client import collect, done, make_topics, many_streams, scripted, text_of, tokens

from plait.schemas import response_topic_of
from plait.service.client import Client

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(170)]


async def test_many_streams_on_one_topic(kafka):
    async with scripted(kafka.bootstrap_servers) as (client, worker):
        await many_streams(client, worker, 20)
        topic = client.response_topic
    async with Client(kafka.bootstrap_servers, per_request_topics=True) as other:
        assert topic not in await other._admin.list_topics()


async def test_topics_of_requests_are_followed_and_read_again(kafka):
    servers = kafka.bootstrap_servers
    async with scripted(servers, per_request_topics=True) as (client, worker):
        request_id = await client.submit("x")
        stream = client.stream(request_id)
        first = asyncio.create_task(anext(stream))
        request = await worker.request()
        await make_topics(servers, response_topic_of(request_id))
        await worker.publish(request, tokens(request, 0, "a"), tokens(request, 1, "b"))
        assert (await asyncio.wait_for(first, 30)).text == "a"
        await stream.aclose()
        async with Client(servers, per_request_topics=True) as later:
            await worker.publish(request, done(request, 2))
            assert text_of(await collect(later, request_id)) == "ab"


async def test_a_stream_survives_a_killed_broker(own_kafka):
    async with scripted(own_kafka.bootstrap_servers) as (client, worker):
        request_id = await client.submit("x")
        request = await worker.request()
        await worker.publish(request, tokens(request, 0, "a"))
        stream = client.stream(request_id, timeout_s=120)
        seen = [await anext(stream)]
        await asyncio.to_thread(own_kafka.kill)
        await asyncio.to_thread(own_kafka.start)
        await worker.publish(request, tokens(request, 1, "b"), done(request, 2))
        seen += [event async for event in stream]
        assert text_of(seen) == "ab"
