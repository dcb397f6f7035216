"""One trace from the producer's span through all stages, and spans that always end."""

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fakes import FakeEngine
from plait.schemas import Request, Sampling, encode
from plait.service.clock import Clock
from plait.service.settings import Settings, TelemetrySettings
from plait.service.telemetry import RequestTrace, header, make_provider, make_tracer
from service_bench import TRACEPARENT, Bench

TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


def body(**sampling: Any) -> bytes:
    return encode(Request(request_id="r1", prompt="hello", sampling=Sampling(**sampling)))


async def test_the_spans_of_a_request() -> None:
    bench = Bench(FakeEngine(preempt=True))
    parent = [("traceparent", TRACEPARENT.encode()), ("tracestate", b"vendor=1"), ("baggage", b"user=7")]
    await bench.serve(body(max_tokens=3, seed=4, temperature=0.5), parent)
    process = bench.process_span()
    assert process.context is not None and process.context.trace_id == TRACE_ID
    assert process.parent is not None and process.parent.span_id == PARENT_ID
    assert process.kind is trace.SpanKind.CONSUMER
    spans = bench.spans()
    assert set(spans) == {"process plait.requests", "queue", "prefill", "decode", "publish"}
    for name in ("queue", "prefill", "decode", "publish"):
        (span,) = spans[name]
        assert span.parent is not None and span.parent.span_id == process.context.span_id
        assert span.start_time is not None and span.end_time is not None and process.start_time is not None
        assert process.start_time <= span.start_time <= span.end_time
    assert [e.name for e in process.events] == ["plait.preempted"]
    assert (process.events[0].attributes or {})["plait.preemption"] == "recompute"
    attributes = process.attributes or {}
    expected = {
        "messaging.system": "kafka",
        "messaging.destination.name": "plait.requests",
        "messaging.kafka.offset": 0,
        "messaging.message.id": "r1",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.seed": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
        "plait.outcome": "done",
        "plait.preemptions": 1,
    }
    assert {name: attributes.get(name) for name in expected} == expected
    for sent in bench.publisher.sent:
        headers = dict(sent.headers)
        assert headers["traceparent"] == b"00-%032x-%016x-01" % (TRACE_ID, process.context.span_id)
        assert headers["tracestate"] == b"vendor=1" and headers["baggage"] == b"user=7"


async def test_every_request_has_a_span_of_its_own_parent() -> None:
    bench = Bench()
    for i in range(3):
        value = encode(Request(request_id=f"r{i}", prompt="x"))
        await bench.serve(value, [("traceparent", b"00-%032x-%016x-01" % (i + 1, i + 1))])
    traces = [span.context.trace_id for span in bench.spans()["process plait.requests"] if span.context]
    assert traces == [1, 2, 3]


async def test_an_unsampled_parent_records_nothing_and_goes_on() -> None:
    exporter = InMemorySpanExporter()
    provider = make_provider(TelemetrySettings(), exporter)
    assert provider is not None
    bench = Bench()
    bench.services.tracer = provider.get_tracer("test")
    await bench.serve(body(), [("traceparent", TRACEPARENT.replace("-01", "-00").encode())])
    provider.force_flush()
    assert exporter.get_finished_spans() == ()
    assert header(bench.publisher.sent[0].headers, "traceparent").startswith(b"00-%032x" % TRACE_ID)  # type: ignore[union-attr, arg-type]
    provider.shutdown()


async def test_without_an_exporter_the_context_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    provider = make_provider(TelemetrySettings())
    assert provider is None
    bench = Bench()
    bench.services.tracer = make_tracer(provider)
    await bench.serve(body(), [("traceparent", TRACEPARENT.encode())])
    await bench.serve(encode(Request(request_id="r2", prompt="x")))
    assert dict(bench.publisher.sent[0].headers)["traceparent"] == TRACEPARENT.encode()
    assert "traceparent" not in dict(bench.publisher.sent[-1].headers)


@pytest.mark.parametrize("by", ["settings", "environment"])
def test_an_endpoint_makes_an_exporter(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "environment":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    settings = TelemetrySettings(otlp_endpoint="http://collector:4318/" if by == "settings" else None)
    provider = make_provider(settings)
    assert provider is not None
    (processor,) = provider._active_span_processor._span_processors
    assert processor.span_exporter._endpoint == "http://collector:4318/v1/traces"  # type: ignore[attr-defined]
    assert provider.resource.attributes["service.name"] == "plait-worker"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from-env")
    named = make_provider(settings)
    assert named is not None and named.resource.attributes["service.name"] == "from-env"
    named.shutdown()
    provider.shutdown()


@pytest.mark.parametrize("value", [b"\xff\xfe", b"nonsense", b"00-0-0-01", b""])
async def test_an_unreadable_context_starts_a_new_trace(value: bytes) -> None:
    bench = Bench()
    await bench.serve(body(), [("traceparent", value), ("tracestate", b"\xff"), ("baggage", b"%%%\xff")])
    assert bench.process_span().parent is None


def test_a_span_ends_once() -> None:
    bench = Settings.load()
    exporter = InMemorySpanExporter()
    provider = make_provider(bench.telemetry, exporter)
    assert provider is not None
    clock = Clock()
    one = RequestTrace(provider.get_tracer("t"), clock, "x", [], clock.monotonic(), {})
    one.end("error", error="internal")
    one.end("done")
    provider.force_flush()
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None and span.attributes["plait.outcome"] == "error"
    provider.shutdown()
