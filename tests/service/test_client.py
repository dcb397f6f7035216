import asyncio
import json
import uuid
from contextlib import asynccontextmanager

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from plait.schemas import (
    JSON,
    DoneEvent,
    ErrorEvent,
    Slo,
    Timing,
    TokensEvent,
    Usage,
    WireError,
    decode_control,
    decode_request,
    encode,
    headers,
    response_topic_of,
)
from plait.service.client import Client, RequestFailed, RequestTooLarge, StreamBroken
from plait.service.embedded import EmbeddedBroker

pytestmark = pytest.mark.timeout(90)


class ScriptedWorker:
    """Reads requests and publishes exactly what a test tells it to."""

    def __init__(self, servers: str, topic: str) -> None:
        self.consumer = AIOKafkaConsumer(topic, bootstrap_servers=servers, auto_offset_reset="earliest")
        self.producer = AIOKafkaProducer(bootstrap_servers=servers, enable_idempotence=True)
        self.last_record = None

    async def request(self):
        record = await asyncio.wait_for(self.consumer.getone(), 20)
        content_type = dict(record.headers)[headers.CONTENT_TYPE].decode()
        self.last_record = record
        return decode_request(record.value, content_type)[0]

    async def publish(self, request, *events, content_type="application/msgpack"):
        for event in events:
            await self.producer.send_and_wait(
                request.response_topic or response_topic_of(request.request_id),
                encode(event, content_type),
                key=request.request_id.encode(),
                headers=[(headers.CONTENT_TYPE, content_type.encode())],
            )


async def make_topics(servers, *topics):
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1) for topic in topics])
    finally:
        await admin.close()


@asynccontextmanager
async def scripted(servers, **options):
    """A client and a scripted worker on a topic of their own."""
    topic = f"requests-{uuid.uuid4().hex}"
    await make_topics(servers, topic, *([options["control_topic"]] if "control_topic" in options else []))
    worker = ScriptedWorker(servers, topic)
    async with Client(servers, requests_topic=topic, **options) as client:
        await worker.producer.start()
        await worker.consumer.start()
        try:
            yield client, worker
        finally:
            await worker.consumer.stop()
            await worker.producer.stop()


def tokens(request, index, text, *, epoch=1, choice=0):
    return TokensEvent(
        request_id=request.request_id,
        index=index,
        epoch=epoch,
        choice=choice,
        token_ids=[ord(c) for c in text],
        text=text,
    )


def done(request, index, *, epoch=1, reason="stop", **fields):
    return DoneEvent(
        request_id=request.request_id,
        index=index,
        epoch=epoch,
        finish_reason=reason,
        finish_reasons=[reason],
        usage=Usage(prompt_tokens=1, completion_tokens=3),
        timing=Timing(queue_ms=1, ttft_ms=2, tpot_ms=3, total_ms=4),
        **fields,
    )


async def collect(client, request_id, **options):
    return [event async for event in client.stream(request_id, **options)]


def text_of(events):
    return "".join(event.text for event in events if isinstance(event, TokensEvent))


async def test_generate_returns_text_usage_and_timing(embedded_broker):
    async with scripted(embedded_broker.bootstrap_servers) as (client, worker):
        task = asyncio.create_task(
            client.generate(
                messages=[{"role": "user", "content": "hi"}],
                priority=7,
                tenant="t",
                slo=Slo(ttft_ms=100),
                metadata={"a": [1]},
                max_tokens=3,
                temperature=0,
                stop="x",
            )
        )
        request = await worker.request()
        assert request.priority == 7 and request.tenant == "t" and request.slo.ttft_ms == 100
        assert request.sampling.max_tokens == 3 and request.sampling.stop == ["x"]
        assert request.metadata == {"a": [1]} and request.created_at > 1_700_000_000_000
        assert request.response_topic == client.response_topic
        assert worker.last_record.key == request.request_id.encode()
        await worker.publish(request, tokens(request, 0, "ab"), tokens(request, 1, "c"), done(request, 2))
        result = await asyncio.wait_for(task, 20)
        assert (result.text, result.token_ids) == ("abc", [97, 98, 99])
        assert result.finish_reason == "stop" and result.usage.completion_tokens == 3
        assert result.timing.ttft_ms == 2 and result.request_id == request.request_id


async def test_duplicates_and_older_epochs_are_dropped(embedded_broker):
    async with scripted(embedded_broker.bootstrap_servers) as (client, worker):
        request_id = await client.submit("x")
        request = await worker.request()
        await worker.publish(
            request,
            tokens(request, 0, "a"),
            tokens(request, 0, "a"),
            tokens(request, 1, "b", epoch=3),
            tokens(request, 2, "zombie", epoch=2),
            tokens(request, 2, "c", epoch=3),
            tokens(request, 1, "b", epoch=3),
            done(request, 3, epoch=2),
            done(request, 3, epoch=3),
        )
        events = await collect(client, request_id)
        assert text_of(events) == "abc"
        assert [event.index for event in events] == [0, 1, 2, 3]


async def test_events_out_of_order_are_put_in_order(embedded_broker):
    async with scripted(embedded_broker.bootstrap_servers) as (client, worker):
        request_id = await client.submit("x")
        request = await worker.request()
        await worker.publish(
            request,
            tokens(request, 1, "b"),
            done(request, 3),
            tokens(request, 0, "a"),
            tokens(request, 2, "c"),
        )
        assert text_of(await collect(client, request_id)) == "abc"


async def test_a_gap_ends_with_an_error_that_names_it(embedded_broker):
    async with scripted(embedded_broker.bootstrap_servers, gap_timeout_s=0.5) as (client, worker):
        request_id = await client.submit("x")
        request = await worker.request()
        await worker.publish(request, tokens(request, 0, "a"), tokens(request, 2, "c"), done(request, 3))
        seen = []
        with pytest.raises(StreamBroken, match=f"event 1 of request {request_id} is missing"):
            async for event in client.stream(request_id):
                seen.append(event)
        assert text_of(seen) == "a"


async def test_a_slow_reader_gets_what_is_before_a_gap(embedded_broker):
    async with scripted(embedded_broker.bootstrap_servers, gap_timeout_s=0.1) as (client, worker):
        request_id = await client.submit("x")
        request = await worker.request()
        await worker.publish(request, *(tokens(request, n, "abcde"[n]) for n in (0, 1, 3, 4)))
        stream = client.stream(request_id)
        seen = [await anext(stream)]
        await asyncio.sleep(1)
        with pytest.raises(StreamBroken, match=f"event 2 of request {request_id} is missing"):
            async with asyncio.timeout(20):
                async for event in stream:
                    seen.append(event)
        assert text_of(seen) == "ab"


async def test_a_reader_that_has_died_says_so(embedded_broker, monkeypatch):
    async with scripted(embedded_broker.bootstrap_servers) as (client, worker):
        request_id = await client.submit("x")
        request = await worker.request()

        def broken(partition, record):
            raise RuntimeError("bug")

        monkeypatch.setattr(client._reader, "_dispatch", broken)
        await worker.publish(request, tokens(request, 0, "a"))
        with pytest.raises(RuntimeError, match="bug"):
            await asyncio.wait_for(collect(client, request_id), 20)


async def test_no_event_in_time_is_a_timeout(embedded_broker):
    async with scripted(embedded_broker.bootstrap_servers) as (client, _):
        request_id = await client.submit("x")
        with pytest.raises(TimeoutError, match=r"no event of request .* for 0.3 s"):
            await collect(client, request_id, timeout_s=0.3)


async def test_error_events_raise(embedded_broker):
    async with scripted(embedded_broker.bootstrap_servers) as (client, worker):
        request_id = await client.submit("x")
        request = await worker.request()
        failure = ErrorEvent(
            request_id=request_id,
            index=0,
            code="overloaded",
            message="the queue is full",
            retryable=True,
            retry_after_ms=1500,
        )
        await worker.publish(request, failure)
        with pytest.raises(RequestFailed, match="overloaded: the queue is full") as caught:
            await collect(client, request_id)
        assert (caught.value.code, caught.value.retryable, caught.value.retry_after_ms) == (
            "overloaded",
            True,
            1500,
        )


async def many_streams(client, worker, count):
    ids = await asyncio.gather(*(client.submit(f"{n}") for n in range(count)))
    requests = [await worker.request() for _ in ids]
    for index in range(3):
        for request in requests:
            await worker.publish(request, tokens(request, index, f"{request.prompt}.{index} "))
    for request in requests:
        await worker.publish(request, done(request, 3))
    streams = await asyncio.gather(*(collect(client, request_id) for request_id in ids))
    assert [text_of(events) for events in streams] == [f"{n}.0 {n}.1 {n}.2 " for n in range(count)]


async def test_many_streams_share_one_consumer(embedded_broker):
    async with scripted(embedded_broker.bootstrap_servers) as (client, worker):
        await many_streams(client, worker, 30)


async def test_per_request_topics_are_followed_once_the_worker_makes_them(embedded_broker):
    async with scripted(embedded_broker.bootstrap_servers, per_request_topics=True) as (client, worker):
        first, second = await client.submit("x"), await client.submit("y")
        tasks = [asyncio.create_task(collect(client, request_id)) for request_id in (first, second)]
        await asyncio.sleep(0.1)
        for _ in tasks:
            request = await worker.request()
            assert request.response_topic is None
            await make_topics(embedded_broker.bootstrap_servers, response_topic_of(request.request_id))
            await worker.publish(request, tokens(request, 0, request.prompt), done(request, 1))
        assert [text_of(await asyncio.wait_for(task, 20)) for task in tasks] == ["x", "y"]


async def test_a_topic_that_goes_between_two_looks_is_waited_for(embedded_broker):
    async with scripted(embedded_broker.bootstrap_servers, per_request_topics=True) as (client, worker):
        listing = client._admin.list_topics

        async def list_topics():
            client._admin.list_topics = listing
            return [*await listing(), response_topic_of(request_id)]

        client._admin.list_topics = list_topics
        request_id = await client.submit("x")
        task = asyncio.create_task(collect(client, request_id))
        request = await worker.request()
        await asyncio.sleep(0.1)
        assert not task.done() and client._admin.list_topics == listing
        await make_topics(embedded_broker.bootstrap_servers, response_topic_of(request_id))
        await worker.publish(request, tokens(request, 0, "x"), done(request, 1))
        assert text_of(await asyncio.wait_for(task, 20)) == "x"


@pytest.mark.parametrize("per_request_topics", [True, False])
async def test_another_client_takes_up_a_stream_from_its_beginning(embedded_broker, per_request_topics):
    servers = embedded_broker.bootstrap_servers
    options = {"per_request_topics": True}
    if not per_request_topics:
        shared = f"answers-{uuid.uuid4().hex}"
        options = {"response_topic": shared}
        await make_topics(servers, shared)
    async with scripted(servers, **options) as (client, worker):
        request_id = await client.submit("x")
        request = await worker.request()
        if per_request_topics:
            await make_topics(servers, response_topic_of(request_id))
        await worker.publish(request, tokens(request, 0, "a"), tokens(request, 1, "b"))
        stream = client.stream(request_id)
        assert (await anext(stream)).text == "a"
        await stream.aclose()
        async with Client(servers, **options) as later:
            await worker.publish(request, done(request, 2))
            assert text_of(await collect(later, request_id)) == "ab"


async def test_a_client_closes_while_its_assignment_changes(embedded_broker):
    servers = embedded_broker.bootstrap_servers
    for turn in range(10):
        async with asyncio.timeout(20):
            async with scripted(servers, per_request_topics=True) as (client, worker):
                request_id = await client.submit("x")
                request = await worker.request()
                await make_topics(servers, response_topic_of(request_id))
                await worker.publish(request, *(tokens(request, n, "a") for n in range(3)))
                stream = client.stream(request_id)
                await anext(stream)
                if turn % 2:
                    client._reader.forget(response_topic_of(request_id))


async def test_streams_survive_a_restart_of_the_broker(tmp_path):
    async with EmbeddedBroker(tmp_path) as broker:
        servers, port = broker.bootstrap_servers, broker.port
        opened = scripted(servers)
        client, worker = await opened.__aenter__()
        request_id = await client.submit("x")
        request = await worker.request()
        await worker.publish(request, tokens(request, 0, "a"))
        stream = client.stream(request_id, timeout_s=60)
        seen = [await anext(stream)]
    async with EmbeddedBroker(tmp_path, port=port):
        await worker.publish(request, tokens(request, 1, "b"), done(request, 2))
        seen += [event async for event in stream]
        assert text_of(seen) == "ab"
        other = asyncio.create_task(client.generate("y"))
        request = await worker.request()
        await worker.publish(request, done(request, 0))
        assert (await asyncio.wait_for(other, 30)).finish_reason == "stop"
        await opened.__aexit__(None, None, None)


async def test_cancel_is_sent_to_the_control_topic_and_by_a_given_up_generate(embedded_broker):
    servers, control = embedded_broker.bootstrap_servers, f"control-{uuid.uuid4().hex}"
    async with scripted(servers, control_topic=control) as (client, _):
        await client.cancel("some-id")
        with pytest.raises(TimeoutError):
            await client.generate("x", request_id="given-up", timeout_s=0.2)
        task = asyncio.create_task(client.generate("x", request_id="stopped"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        consumer = AIOKafkaConsumer(control, bootstrap_servers=servers, auto_offset_reset="earliest")
        async with consumer:
            records = [await asyncio.wait_for(consumer.getone(), 20) for _ in range(3)]
        kinds = [decode_control(r.value, dict(r.headers)[headers.CONTENT_TYPE].decode()) for r in records]
        assert [cancel.request_id for cancel in kinds] == ["some-id", "given-up", "stopped"]


async def test_a_request_that_is_too_large_is_refused_before_it_is_produced(embedded_broker):
    async with scripted(embedded_broker.bootstrap_servers, max_request_bytes=1000) as (client, worker):
        with pytest.raises(RequestTooLarge, match="the limit is 1000"):
            await client.submit("x" * 2000)
        with pytest.raises(TypeError, match="unknown sampling fields: temprature"):
            await client.submit("x", temprature=1)
        with pytest.raises(WireError, match=r"sampling\.temperature: must be greater than or equal to 0"):
            await client.submit("x", temperature=-1)
        with pytest.raises(WireError, match="exactly one of"):
            await client.submit("x", prompt_token_ids=[1])
        await client.submit("good")
        assert (await worker.request()).prompt == "good"


async def test_json_and_non_streamed_answers(embedded_broker):
    async with scripted(embedded_broker.bootstrap_servers, content_type=JSON) as (client, worker):
        task = asyncio.create_task(client.generate("x", stream=False, n=2))
        request = await worker.request()
        assert json.loads(worker.last_record.value)["stream"] is False
        answer = done(request, 0, text="one", texts=["one", "two"], token_ids=[1, 2])
        await worker.publish(request, answer, content_type=JSON)
        result = await asyncio.wait_for(task, 20)
        assert (result.text, result.texts, result.token_ids) == ("one", ["one", "two"], [1, 2])


async def test_the_trace_goes_on_in_the_headers(embedded_broker):
    tracer = TracerProvider().get_tracer("test")
    async with scripted(embedded_broker.bootstrap_servers) as (client, worker):
        with tracer.start_as_current_span("caller") as span:
            await client.submit("x")
        await worker.request()
        sent = dict(worker.last_record.headers)
        trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        assert sent["traceparent"].decode().split("-")[1] == trace_id
        assert sent[headers.PLAIT_TYPE] == b"request"


async def test_the_clients_own_topic_is_deleted_at_the_end(embedded_broker):
    async with Client(embedded_broker.bootstrap_servers) as client:
        topic = client.response_topic
        assert topic in await client._admin.list_topics()
    async with Client(embedded_broker.bootstrap_servers, per_request_topics=True) as other:
        assert topic not in await other._admin.list_topics()


async def topics_of(servers):
    async with Client(servers, per_request_topics=True) as other:
        return await other._admin.list_topics()


async def test_the_topic_stays_while_a_worker_writes_to_it(embedded_broker):
    async with scripted(embedded_broker.bootstrap_servers) as (client, worker):
        await client.submit("x", request_id="open")
        await worker.request()
        topic = client.response_topic
    assert topic in await topics_of(embedded_broker.bootstrap_servers)


async def test_the_end_of_a_cancelled_request_is_heard_before_the_topic_goes(embedded_broker):
    servers, control = embedded_broker.bootstrap_servers, f"control-{uuid.uuid4().hex}"
    async with scripted(servers, control_topic=control) as (client, worker):
        request_id = await client.submit("x", request_id="given-up")
        request = await worker.request()
        await client.cancel(request_id)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0.2)
        assert not closing.done()
        topic = client.response_topic
        await worker.publish(request, done(request, 0, reason="cancelled"))
        await closing
        assert topic not in await topics_of(servers)


async def test_an_unreachable_broker_is_an_error_and_leaks_nothing():
    with pytest.raises(Exception, match=r"no Kafka broker answers at 127\.0\.0\.1:1"):
        async with Client("127.0.0.1:1"):
            pass
