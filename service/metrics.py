"""Prometheus metrics of one worker, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.service import names
from plait.service.engine_port import EngineLike

LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)


class Metrics:
    """What the parts of a worker count; names and meanings are in `names`."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self.requests = counter(names.REQUESTS, "Requests that ended", "outcome", "code")
        self.prompt_tokens = counter(names.PROMPT_TOKENS, "Prompt tokens of ended requests")
        self.completion_tokens = counter(names.COMPLETION_TOKENS, "Generated tokens of ended requests")
        self.queue = histogram(names.QUEUE_SECONDS, "Arrival to first iteration", LATENCY)
        self.ttft = histogram(names.TTFT_SECONDS, "Arrival to first token", LATENCY)
        self.tpot = histogram(names.TPOT_SECONDS, "Mean time per token after the first", PER_TOKEN)
        self.total = histogram(names.REQUEST_SECONDS, "Arrival to last token", LATENCY)
        self.slo = counter(names.SLO_REQUESTS, "Requests with an objective", "objective", "met")
        self.in_flight = gauge(names.IN_FLIGHT, "Requests read and not yet answered", "lane")
        self.in_flight_bytes = gauge(names.IN_FLIGHT_BYTES, "Bytes of their messages", "lane")
        self.paused = gauge(names.PAUSED, "Partitions paused by backpressure", "lane")
        self.assigned = gauge(names.ASSIGNED, "Partitions assigned", "lane")
        self.lag = gauge(names.LAG, "Records behind the end of the partition", "topic", "partition")
        self.commits = counter(names.COMMITS, "Offset commits", "result")
        self.out_of_range = counter(names.OUT_OF_RANGE, "Positions that were not there", "policy")
        self.rebalances = counter(names.REBALANCES, "Assignments received")
        self.dead_letters = counter(names.DEAD_LETTERS, "Messages in the dead-letter topic", "reason")
        self.events = counter(names.EVENTS, "Events handed to the producer", "type")
        self.event = {kind: self.events.labels(type=kind) for kind in ("tokens", "done", "error")}
        self.publish_errors = counter(names.PUBLISH_ERRORS, "Failed sends", "retried")
        self.response_topics = counter(names.RESPONSE_TOPICS, "Response topics", "action")
        self.control = counter(names.CONTROL_MESSAGES, "Control messages read", "kind")

    def watch(self, engine: EngineLike) -> None:
        """Also report the engine's own statistics, read at each scrape."""
        self.registry.register(_EngineCollector(engine))


class _EngineCollector(Collector):
    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats
        yield GaugeMetricFamily(names.ENGINE_RUNNING, "Sequences in the batch", stats.running)
        yield GaugeMetricFamily(names.ENGINE_WAITING, "Sequences waiting", stats.waiting)
        yield GaugeMetricFamily(names.ENGINE_FREE_BLOCKS, "Free KV blocks", stats.free_blocks)
        yield GaugeMetricFamily(names.ENGINE_TOTAL_BLOCKS, "All KV blocks", stats.total_blocks)
        yield CounterMetricFamily(names.ENGINE_ITERATIONS, "Iterations", stats.iterations)
        yield CounterMetricFamily(names.ENGINE_GENERATED, "Tokens generated", stats.generated_tokens)
        yield CounterMetricFamily(names.ENGINE_PREEMPTIONS, "Preemptions", stats.preemptions)
        error = "Mean relative error of predicted iteration times"
        yield GaugeMetricFamily(names.ENGINE_PREDICTION_ERROR, error, stats.prediction_error)
        refused = CounterMetricFamily(names.ENGINE_REFUSED, "Refused as overloaded", labels=["reason"])
        for reason, count in stats.refused.items():
            refused.add_metric([reason], count)
        yield refused
        yield GaugeMetricFamily(
            names.ENGINE_FORECAST_ERROR, "Mean error of forecast first tokens", stats.forecast_error
        )
        yield CounterMetricFamily(names.ENGINE_SWAPS, "Preemptions with KV kept", stats.swaps)
        yield CounterMetricFamily(names.ENGINE_RESTARTS, "Restarts after crashes", stats.restarts)
        swapped = CounterMetricFamily(names.ENGINE_SWAPPED_BLOCKS, "KV blocks copied", labels=["direction"])
        swapped.add_metric(["out"], stats.swapped_out_blocks)
        swapped.add_metric(["in"], stats.swapped_in_blocks)
        yield swapped
        host = GaugeMetricFamily(names.ENGINE_HOST_BLOCKS, "Blocks of the CPU pool", labels=["state"])
        host.add_metric(["used"], stats.host_blocks_used)
        host.add_metric(["free"], stats.host_blocks - stats.host_blocks_used)
        yield host
        prefix = CounterMetricFamily(
            names.ENGINE_PREFIX_TOKENS, "Tokens looked up in the prefix cache", labels=["result"]
        )
        prefix.add_metric(["hit"], stats.prefix_hit_tokens)
        prefix.add_metric(["miss"], stats.prefix_queried_tokens - stats.prefix_hit_tokens)
        yield prefix
