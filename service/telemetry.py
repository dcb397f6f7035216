"""OpenTelemetry traces: one process span per request, a child of its producer's span."""

from __future__ import annotations

import os
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from plait.engine.api import Timeline
from plait.schemas import headers as wire
from plait.service import names
from plait.service.clock import Clock
from plait.service.settings import TelemetrySettings

Headers = Sequence[tuple[str, bytes]]

DEFAULT_SERVICE_NAME = "plait-worker"
_TRACE = TraceContextTextMapPropagator()
_BAGGAGE = W3CBaggagePropagator()
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def make_provider(settings: TelemetrySettings, exporter: SpanExporter | None = None) -> TracerProvider | None:
    """A provider that samples as the parent did and exports over OTLP/HTTP; None when nothing is configured.

    An endpoint in `settings` wins over OTEL_EXPORTER_OTLP_*; all else of the exporter follows those.
    """
    if exporter is None:
        if settings.otlp_endpoint is None and not any(map(os.environ.get, _ENDPOINT_VARIABLES)):
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        endpoint = settings.otlp_endpoint
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
    service_name = settings.service_name or os.environ.get("OTEL_SERVICE_NAME") or DEFAULT_SERVICE_NAME
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        resource=Resource.create({SERVICE_NAME: service_name}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def make_tracer(provider: TracerProvider | None) -> trace.Tracer:
    """Without a provider a tracer that records nothing and passes the producer's context on."""
    return provider.get_tracer(names.INSTRUMENTATION) if provider else trace.NoOpTracer()


def header(headers: Headers, name: str) -> bytes | None:
    """The last value of this name, as Kafka's own `lastHeader`."""
    return next((value for key, value in reversed(headers) if key == name and value is not None), None)


def header_text(headers: Headers, name: str) -> str | None:
    value = header(headers, name)
    try:
        return value.decode() if value is not None else None
    except UnicodeDecodeError:
        return None


def extract(headers: Headers) -> Context:
    """The W3C trace context and baggage of a record; what is missing or unreadable is ignored."""
    carrier = {
        name: text
        for name in (wire.TRACEPARENT, wire.TRACESTATE, wire.BAGGAGE)
        if (text := header_text(headers, name)) is not None
    }
    return _BAGGAGE.extract(carrier, _TRACE.extract(carrier, Context()))


def inject(span: trace.Span, parent: Context, incoming: Headers) -> list[tuple[str, bytes]]:
    """Headers that make this span the parent of whoever reads them. Baggage goes on byte for byte."""
    carrier: dict[str, str] = {}
    _TRACE.inject(carrier, trace.set_span_in_context(span, parent))
    result = [(name, text.encode()) for name, text in carrier.items()]
    raw = header(incoming, wire.BAGGAGE)
    if raw is not None:
        result.append((wire.BAGGAGE, raw))
    return result


class RequestTrace:
    """The spans of one request. Stages are added once their times are known, so no token costs a span."""

    def __init__(
        self,
        tracer: trace.Tracer,
        clock: Clock,
        name: str,
        headers: Headers,
        arrived: float,
        attributes: dict[str, AttributeValue],
    ) -> None:
        self._tracer = tracer
        self._clock = clock
        self._offset_ns = clock.offset_ns()  # one for all spans of the request, or they would not be in order
        self._parent = extract(headers)
        self._span = tracer.start_span(
            name,
            context=self._parent,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            start_time=self._epoch_ns(arrived),
        )
        self.headers = inject(self._span, self._parent, headers)
        self._ended = False

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    def set(self, attributes: dict[str, AttributeValue | None]) -> None:
        self._span.set_attributes({k: v for k, v in attributes.items() if v is not None})

    def engine_stages(self, choice: int, timeline: Timeline) -> None:
        """Add queue, prefill and decode of one sequence, as far as it got."""
        if not self.recording:
            return
        attributes: dict[str, AttributeValue] = {names.CHOICE: choice}
        end = timeline.finished or self._clock.monotonic()
        bounds = [timeline.arrived, timeline.scheduled, timeline.first_token, end]
        for name, start, stop in zip(
            (names.SPAN_QUEUE, names.SPAN_PREFILL, names.SPAN_DECODE), bounds, bounds[1:], strict=False
        ):
            if start is not None:
                self._stage(name, start, end if stop is None else stop, attributes)
        swaps = set(timeline.swaps)
        for at in timeline.preemptions:
            kind = {names.PREEMPTION: "swap" if at in swaps else "recompute"}
            self._span.add_event(names.EVENT_PREEMPTED, attributes | kind, self._epoch_ns(at))
        for at in timeline.restarts:
            self._span.add_event(names.EVENT_ENGINE_RESTARTED, attributes, self._epoch_ns(at))

    def publish_stage(self, topic: str, start: float, end: float, events: int) -> None:
        if self.recording:
            attributes: dict[str, AttributeValue] = {
                names.MESSAGING_SYSTEM: names.SYSTEM,
                names.MESSAGING_OPERATION_TYPE: "send",
                names.MESSAGING_OPERATION_NAME: names.SPAN_PUBLISH,
                names.MESSAGING_DESTINATION: topic,
                names.MESSAGING_BATCH_COUNT: events,
            }
            self._stage(names.SPAN_PUBLISH, start, end, attributes, SpanKind.PRODUCER)

    def end(self, outcome: str, *, error: str | None = None, message: str | None = None) -> None:
        """End the process span; the first call counts. `error` is a code, and makes the status an error."""
        if self._ended:
            return
        self._ended = True
        self._span.set_attribute(names.OUTCOME, outcome)
        if error is not None:
            self._span.set_attribute(names.ERROR_TYPE, error)
            self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.end(self._epoch_ns(self._clock.monotonic()))

    def _epoch_ns(self, monotonic: float) -> int:
        return self._offset_ns + int(monotonic * 1_000_000_000)

    def _stage(
        self,
        name: str,
        start: float,
        end: float,
        attributes: dict[str, AttributeValue],
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        span = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(self._span, self._parent),
            kind=kind,
            attributes=attributes,
            start_time=self._epoch_ns(start),
        )
        span.end(self._epoch_ns(max(start, end)))
