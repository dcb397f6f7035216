"""A worker on a broker: requests in, events out. On the embedded broker and on Apache Kafka."""

import asyncio
import gzip
import json
import random
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fakes import FakeEngine
from plait.service import sweeper
from plait.service.worker import Worker
from service_bench import until
from worker_harness import Site, assert_answered_once, request


@pytest.fixture(params=["embedded_broker", pytest.param("kafka", marks=pytest.mark.kafka)])
def broker(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param).bootstrap_servers)


def trace_parent(number: int) -> str:
    return f"00-{number + 1:032x}-{number + 1:016x}-01"


async def test_two_hundred_requests_of_a_foreign_producer(broker: str) -> None:
    site = Site(broker)
    shared = [f"{site.name}.client-a", f"{site.name}.client-b"]
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    messages, topics = [], set()
    for i in range(200):
        topic = None if i % 2 else shared[i % 4 // 2]
        topics.add(topic or site.response_topic(f"r{i}"))
        fields = {"response_topic": topic} if topic else {}
        value, headers = request(
            f"r{i}", "json" if i % 3 else "msgpack", sampling={"max_tokens": 3 + i % 5}, **fields
        )
        messages.append((value, [*headers, ("traceparent", trace_parent(i).encode())]))
    await site.create(shared[0], 3)
    async with site.worker(FakeEngine(pace=0.001), provider):
        await site.produce(messages)
        answers = await site.answers(topics, 200)
    assert len(answers) == 200
    for i in range(200):
        events = answers[f"r{i}"]
        done = assert_answered_once(events)
        assert done.type == "done" and done.usage.completion_tokens == 3 + i % 5
        assert len({(m.topic, m.partition) for m in events}) == 1, "one request stays in one partition"
        for message in events:
            headers = dict(message.headers)
            assert headers["content-type"] == (b"application/json" if i % 3 else b"application/msgpack")
            assert (headers["traceparent"] or b"").split(b"-")[1].decode() == f"{i + 1:032x}"
    by_trace: dict[int, list[Any]] = {}
    for span in exporter.get_finished_spans():
        by_trace.setdefault(span.context.trace_id, []).append(span)
    assert len(by_trace) == 200
    for i in range(200):
        spans = {span.name: span for span in by_trace[i + 1]}
        process = spans.pop(f"process {site.topics.requests}")
        assert process.parent.span_id == i + 1, "a child of the producer's span"
        assert set(spans) == {"queue", "prefill", "decode", "publish"}
        assert all(span.parent.span_id == process.context.span_id for span in spans.values())
    assert sum((await site.committed()).values()) == 200


async def test_spans_are_exported_also_at_the_end(broker: str) -> None:
    received: list[ExportTraceServiceRequest] = []

    async def collect(http_request: web.Request) -> web.Response:
        body = await http_request.read()
        if http_request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        received.append(ExportTraceServiceRequest.FromString(body))
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
    site = Site(broker, telemetry={"otlp_endpoint": endpoint, "service_name": "under-test"})
    try:
        async with site.worker():
            await site.produce([request("r"), (b"bad", [])])
            await site.answers([site.response_topic("r")], 1)
            await site.read([site.topics.dlq], lambda found: found)
    finally:
        await runner.cleanup()
    spans = [s for r in received for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans]
    process = f"process {site.topics.requests}"
    assert sorted(s.name for s in spans) == ["decode", "prefill", process, process, "publish", "queue"]
    resource = {a.key: a.value.string_value for a in received[0].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "under-test"


def malformed(rng: random.Random, number: int) -> tuple[bytes | None, list[tuple[str, Any]]]:
    """Bytes of all kinds that are no request; most have no id, some a valid one."""
    good, _ = request(f"bad{number}")
    fields = json.loads(good)
    wrong = {
        "prompt": 7,
        "sampling": {"temperature": 1e999},
        "priority": "high",
        "slo": {"deadline_ms": -(2**70)},
        "messages": [],
        "v": 2**80,
        "stream": "yes",
        "created_at": 10**40,
        "response_topic": "a/b",
    }
    kind = number % 8
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 300)), []
    if kind == 1:
        return None, []
    if kind == 2:
        return b"", [("content-type", b"\xff\xfe")]
    if kind == 3:
        return good[: rng.randrange(1, len(good) - 1)], []
    if kind == 4:
        return json.dumps({"prompt": "no id", "n": 10**300}).encode(), []
    if kind == 5:
        return good, [("content-type", b"application/msgpack")]
    key = rng.choice(list(wrong))
    return json.dumps(fields | {key: wrong[key]}).encode(), [
        ("reply_to", rng.randbytes(4)),
        ("traceparent", b"\xff"),
    ]


async def test_a_thousand_malformed_messages_among_a_hundred_good_ones(broker: str) -> None:
    site = Site(broker, kafka={"fetch_max_wait_ms": 50})
    rng = random.Random(7)
    bad = [malformed(rng, i) for i in range(1000)]
    good = [request(f"good{i}", response_topic=f"{site.name}.good") for i in range(100)]
    mixed = [*bad, *good]
    rng.shuffle(mixed)
    async with site.worker(FakeEngine()) as worker:
        await site.produce(mixed)
        answers = await site.answers([f"{site.name}.good"], 100)
        await until_committed(site, 1100)
        refused = dict(await refused_answers(site))
        letters = await site.read([site.topics.dlq], lambda found: len(found) + len(refused) >= 1000)
        assert worker.ready.is_set()
    assert len(answers) == 100
    for events in answers.values():
        assert assert_answered_once(events).type == "done"
    assert len(letters) + len(refused) == 1000, "every one is in the dead-letter topic or was answered"
    assert len(letters) > 500 and len(refused) > 100
    values = sorted(value or b"" for value, _ in bad)
    for letter in letters:
        assert (letter.value or b"") in values
        found = dict(letter.headers)
        assert found["plait-dlq-reason"] and found["plait-dlq-topic"] == site.topics.requests.encode()
    tombstones = [letter for letter in letters if letter.value is None]
    assert len(tombstones) == sum(value is None for value, _ in bad)


async def test_a_dead_letter_as_large_as_a_message_can_be(broker: str) -> None:
    site = Site(broker)
    value = b"{" + b"x" * 1_048_000
    async with site.worker():
        await site.produce([(value, [])])
        (letter,) = await site.read([site.topics.dlq], lambda found: found)
    assert letter.value == value


async def test_a_record_that_the_client_library_cannot_decode(broker: str) -> None:
    site = Site(broker, partitions=2)
    async with site.worker():
        for i in range(3):
            good, headers = request(f"r{i}")
            await site.produce_raw(good, headers, [("name", b"x")], bad_name=b"\xff\xfe\xff\xfe")
        answers = await site.answers([site.response_topic(f"r{i}") for i in range(3)], 3)
        letters = await site.read([site.topics.dlq], lambda found: len(found) >= 6)
    assert all(assert_answered_once(events).type == "done" for events in answers.values())
    reasons = {
        d["plait-dlq-offset"]: d["plait-dlq-reason"] or b"" for d in (dict(m.headers) for m in letters)
    }
    assert set(reasons) == {b"0", b"2", b"3", b"5", b"6", b"8"}
    for offset, reason in reasons.items():
        assert (b"no value" if offset in (b"0", b"3", b"6") else b"cannot be decoded") in reason
    assert sum((await site.committed()).values()) == 9


async def refused_answers(site: Site) -> list[tuple[str, str]]:
    """(request id, error code) of every per-request topic."""
    topics = {t for t in await site.topic_names() if t.startswith(site.topics.responses_prefix)}
    answers = await site.answers(topics, len(topics))
    result = []
    for request_id, events in answers.items():
        error = assert_answered_once(events)
        assert error.type == "error" and error.code == "invalid_request", error
        result.append((request_id, str(error.code)))
    return result


async def until_committed(site: Site, count: int) -> None:
    async with asyncio.timeout(60):
        while sum((await site.committed()).values()) != count:  # noqa: ASYNC110 another process commits
            await asyncio.sleep(0.1)


async def test_cancel_before_while_and_after(broker: str) -> None:
    site = Site(broker)
    engine = FakeEngine(pace=0.02)
    long = {"sampling": {"max_tokens": 2000}}
    async with site.worker(engine) as worker:
        await site.cancel("before")
        await until(lambda: worker.cancels.seen("before"))
        await site.produce([request("before", **long), request("while", **long), request("after")])
        await until(lambda: any(r.sampling.max_tokens == 2000 for r in engine.submitted))
        await site.answers([site.response_topic("after")], 1)
        await site.cancel("after")
        await site.cancel("while")
        answers = await site.answers(map(site.response_topic, ("before", "while", "after")), 3)
        reasons = {r: assert_answered_once(events).finish_reason for r, events in answers.items()}  # type: ignore[union-attr]
        assert reasons == {"before": "cancelled", "while": "cancelled", "after": "length"}
        assert engine.idle
        await site.produce([(b"not a cancellation", [])], site.topics.control)
        await site.produce([request("later")])
        await site.answers([site.response_topic("later")], 1)


async def test_stop_finishes_what_is_in_flight(broker: str) -> None:
    site = Site(broker)
    engine = FakeEngine(pace=0.05)
    async with site.worker(engine) as worker:
        await site.produce([request(f"r{i}") for i in range(5)])
        await until(lambda: len(engine.submitted) == 5)
        worker.stop()
    answers = await site.answers([site.response_topic(f"r{i}") for i in range(5)], 5)
    assert all(assert_answered_once(events).type == "done" for events in answers.values())
    assert sum((await site.committed()).values()) == 5


async def test_what_the_drain_limit_cuts_off_is_answered_by_the_next_worker(broker: str) -> None:
    site = Site(broker, worker={"drain_seconds": 0.2})
    engine = FakeEngine(pace=0.001)
    async with site.worker(engine):
        await site.produce([request("quick")])
        await site.answers([site.response_topic("quick")], 1)
        engine.hold()
        await site.produce([request("slow")])
        await until(lambda: len(engine.submitted) == 2)
    assert sum((await site.committed()).values()) == 1
    async with site.worker():
        answers = await site.answers([site.response_topic("slow"), site.response_topic("quick")], 2)
    assert assert_answered_once(answers["slow"]).type == "done"
    assert assert_answered_once(answers["quick"]).type == "done", "not answered again"


async def test_a_second_stop_does_not_wait(broker: str) -> None:
    site = Site(broker, worker={"drain_seconds": 1000})
    engine = FakeEngine()
    engine.hold()
    async with site.worker(engine) as worker:
        await site.produce([request("r")])
        await until(lambda: engine.submitted)
        worker.stop()
        worker.stop()


async def test_response_topics_are_removed_after_their_time(broker: str) -> None:
    site = Site(broker, topics={"response_ttl_s": 1.0, "orphan_after_s": 2.0})
    left_behind, active = site.response_topic("orphan"), site.response_topic("active")
    for topic in (left_behind, active):
        await site.create(topic, 1)
    await site.produce([(b"old", [])], left_behind)
    async with site.worker():
        await site.produce([request("r")])
        await site.answers([site.response_topic("r")], 1)
        async with asyncio.timeout(30):
            while {site.response_topic("r"), left_behind} & await site.topic_names():
                await site.produce([(b"new", [])], active)
                await asyncio.sleep(0.2)
        assert active in await site.topic_names(), "somebody publishes there"
        await site.produce([request("r")])
        await site.answers([site.response_topic("r")], 1)


async def test_a_topic_that_goes_while_it_is_asked_for_holds_up_no_other(
    broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "ASK_MS", 500)
    site = Site(broker, topics={"orphan_after_s": 0.5})
    left_behind, gone = site.response_topic("orphan"), site.response_topic("gone")
    await site.create(left_behind, 1)
    await site.produce([(b"old", [])], left_behind)
    await asyncio.sleep(0.6)
    worker = Worker(site.settings, FakeEngine())
    async with asyncio.timeout(10):
        assert await worker.sweeper._stale([gone, left_behind]) == [left_behind]


async def test_an_unknown_response_topic_is_dead_lettered_when_none_may_be_made(broker: str) -> None:
    site = Site(broker, topics={"create_named_responses": False})
    await site.create(f"{site.name}.known", 2)
    async with site.worker():
        await site.produce(
            [
                request("a", response_topic=f"{site.name}.unknown"),
                request("b", response_topic=f"{site.name}.known"),
            ]
        )
        answers = await site.answers([f"{site.name}.known"], 1)
        (letter,) = await site.read([site.topics.dlq], lambda found: found)
    assert list(answers) == ["b"]
    assert b"unknown: does not exist" in (dict(letter.headers)["plait-dlq-reason"] or b"")
    assert f"{site.name}.unknown" not in await site.topic_names(), "looking must not make it"


async def test_admin_endpoint(broker: str) -> None:
    site = Site(broker)
    engine = FakeEngine()
    async with aiohttp.ClientSession() as http:

        async def get(path: str) -> tuple[int, str]:
            async with http.get(f"http://127.0.0.1:{worker.http.port}{path}") as response:
                return response.status, await response.text()

        async with site.worker(engine) as worker:
            for path in ("/livez", "/readyz", "/startupz"):
                assert await get(path) == (200, "ok")
            await site.produce([request("r"), (b"bad", [])])
            await site.answers([site.response_topic("r")], 1)
            await site.read([site.topics.dlq], lambda found: found)
            status, text = await get("/metrics")
            assert status == 200
            assert 'plait_requests_total{code="",outcome="done"} 1.0' in text
            assert 'plait_dead_letters_total{reason="undecodable"} 1.0' in text
            assert "plait_engine_generated_tokens_total 8.0" in text
            assert 'plait_assigned_partitions{lane="default"} 4.0' in text
            engine.ready = False
            assert (await get("/readyz"))[0] == 503
            engine.hold()
            engine.ready = True
            await site.produce([request("s")])
            await until(lambda: len(engine.submitted) == 2)
            worker.stop()
            assert await get("/readyz") == (503, "stopping")
            assert (await get("/livez"))[0] == 200, "draining is no reason for a restart"
            engine.release()
