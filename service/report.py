"""What is said of one request in its spans and in the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from plait.engine.api import Finish
from plait.service import names
from plait.service.admission import Incoming
from plait.service.answers import Summary, time_per_token
from plait.service.metrics import Metrics
from plait.service.telemetry import RequestTrace


def describe(trace: RequestTrace, incoming: Incoming, served: str) -> None:
    """Put the request's parameters on its process span."""
    request = incoming.request
    trace.set({names.MESSAGING_MESSAGE_ID: incoming.request_id})
    if request is None or not trace.recording:
        return
    sampling = request.sampling
    trace.set(
        {
            names.GEN_AI_OPERATION: "chat" if request.messages else "text_completion",
            names.GEN_AI_PROVIDER: names.PROVIDER,
            names.GEN_AI_REQUEST_MODEL: request.model or served,
            names.GEN_AI_RESPONSE_MODEL: served,
            names.GEN_AI_RESPONSE_ID: request.request_id,
            names.GEN_AI_MAX_TOKENS: sampling.max_tokens,
            names.GEN_AI_TEMPERATURE: sampling.temperature,
            names.GEN_AI_TOP_P: sampling.top_p,
            names.GEN_AI_TOP_K: sampling.top_k or None,
            names.GEN_AI_SEED: sampling.seed,
            names.GEN_AI_CHOICES: sampling.n if sampling.n > 1 else None,
            names.GEN_AI_STREAM: request.stream,
            names.PRIORITY: request.priority,
            names.TENANT: request.tenant,
        }
    )


def measure(metrics: Metrics, summary: Summary, finishes: Iterable[Finish]) -> None:
    """Observe the times and objectives of an answered request."""
    timing = summary.timing
    metrics.total.observe(timing.total_ms / 1000)
    if timing.queue_ms is not None:
        metrics.queue.observe(timing.queue_ms / 1000)
    if timing.ttft_ms is not None:
        metrics.ttft.observe(timing.ttft_ms / 1000)
    for finish in finishes:
        pace = time_per_token(finish.timeline, finish.completion_tokens)
        if pace is not None:
            metrics.tpot.observe(pace)
    for objective, met in summary.slo.model_dump(exclude_none=True).items():
        metrics.slo.labels(objective=objective.removesuffix("_met"), met=str(met).lower()).inc()


def conclude(
    trace: RequestTrace,
    metrics: Metrics,
    finishes: Mapping[int, Finish],
    outcome: str,
    error: tuple[str, str] | None,
    resumed: int,
) -> None:
    """Count the request and end its spans. `error` is a code and a message, `resumed` the number of tokens that an
    earlier worker generated, and counted."""
    if finishes:
        prompt = max(f.prompt_tokens for f in finishes.values())
        completion = sum(f.completion_tokens for f in finishes.values())
        metrics.prompt_tokens.inc(prompt)
        metrics.completion_tokens.inc(max(0, completion - resumed))
        trace.set(
            {
                names.GEN_AI_INPUT_TOKENS: prompt,
                names.GEN_AI_OUTPUT_TOKENS: completion,
                names.GEN_AI_CACHED_TOKENS: min(f.cached_tokens for f in finishes.values()),
                names.GEN_AI_FINISH_REASONS: [f.reason for _, f in sorted(finishes.items())],
                names.PREEMPTIONS: sum(len(f.timeline.preemptions) for f in finishes.values()),
            }
        )
        for choice, finish in sorted(finishes.items()):
            trace.engine_stages(choice, finish.timeline)
    code, message = error or (None, None)
    metrics.requests.labels(outcome=outcome, code=code or "").inc()
    trace.end(outcome, error=code, message=message)
