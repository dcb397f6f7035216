"""`python -m benchmarks.pipeline`: what the way through Kafka costs, with an engine that costs nothing.

Requests and token events per second of CPU of one worker, beside a bare aiokafka echo that publishes the same events;
the time that the way adds to the first token; a topic per request beside a shared one. On an Apache Kafka of its own
(Java 17 and Maven), or on `--bootstrap-servers`. The last line is one JSON object of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console
from rich.table import Table

from plait.schemas import TokensEvent
from plait.service.client import Client

ROOT = Path(__file__).parents[1]
PROMPT = "a prompt of eight words that says little"


@contextlib.contextmanager
def brokers(given: str | None) -> Iterator[str]:
    if given:
        yield given
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from kafka_broker import KafkaBroker

    with tempfile.TemporaryDirectory() as folder:
        broker = KafkaBroker(Path(folder) / "kafka")
        broker.start()
        try:
            yield broker.bootstrap_servers
        finally:
            broker.kill()


class Run:
    """One measured process with topics of its own."""

    def __init__(self, servers: str, what: str, **job: Any) -> None:
        self.name = f"bench-{uuid.uuid4().hex[:8]}"
        self.servers, self.what = servers, what
        self.read: dict[int, int] = {}  # how far the shared topic of answers was read, by partition
        self.requests, self.answers = f"{self.name}.requests", f"{self.name}.answers"
        known = {"servers": servers, "name": self.name, "requests": self.requests, "answers": self.answers}
        self.job = {"seats": 64, "iteration_s": 0.0} | known | job
        admin = AdminClient({"bootstrap.servers": servers})
        wanted = [NewTopic(self.requests, 4, 1), NewTopic(self.answers, 4, 1)]
        for made in admin.create_topics(wanted).values():
            made.result(30)

    @contextlib.asynccontextmanager
    async def process(self) -> AsyncIterator[psutil.Process]:
        command = [sys.executable, "-m", "benchmarks.pipeline_processes", self.what, json.dumps(self.job)]
        started = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        try:
            assert started.stdout is not None
            line = await asyncio.wait_for(started.stdout.readline(), 90)
            if line != b"ready\n":
                raise RuntimeError(f"{self.what} did not start")
            yield psutil.Process(started.pid)
        finally:
            if started.returncode is None:
                started.terminate()
            await started.wait()


def produce(run: Run, count: int, tokens: int, per_request: bool, start: int) -> None:
    producer = Producer({"bootstrap.servers": run.servers, "linger.ms": 5})
    for i in range(start, start + count):
        request = {"request_id": f"{run.name}-{i}", "prompt": PROMPT, "sampling": {"max_tokens": tokens}}
        if not per_request:
            request["response_topic"] = run.answers
        producer.produce(run.requests, msgpack.packb(request), key=request["request_id"])
        producer.poll(0)
    producer.flush(60)


def count_ends(run: Run, count: int, per_request: bool, start: int) -> tuple[int, int]:
    """Wait for the terminal events of these requests; returns how many events and bytes there were. Not to
    disturb what is measured, the reader is librdkafka's."""
    topics = [run.answers]
    if per_request:
        topics = [f"plait.responses.{run.name}-{i}" for i in range(start, start + count)]
    options = {"bootstrap.servers": run.servers, "group.id": f"{run.name}-reader", "fetch.wait.max.ms": 20}
    consumer = Consumer(options)
    ends = events = size = 0
    try:
        assigned: set[str] = set()
        while ends < count:
            if len(assigned) < len(topics):
                known = consumer.list_topics(timeout=30).topics
                fresh = [t for t in topics if t not in assigned and t in known and known[t].partitions]
                assigned.update(fresh)
                begin = {} if per_request else run.read
                parts = [(topic, partition) for topic in fresh for partition in known[topic].partitions]
                consumer.incremental_assign([TopicPartition(t, p, begin.get(p, 0)) for t, p in parts])
            for message in consumer.consume(1000, 0.1):
                if message.error() is None:
                    events += 1
                    size += len(message.value())
                    ends += dict(message.headers())["plait-type"] in (b"done", b"error")
                    if not per_request:
                        run.read[message.partition()] = message.offset() + 1
    finally:
        consumer.close()
    return events, size


async def throughput(
    servers: str, what: str, count: int, tokens: int, per_request: bool, **job: Any
) -> dict[str, float]:
    run = Run(servers, what, **job)
    async with run.process() as process:
        warm = min(count, 100)
        await asyncio.to_thread(produce, run, warm, tokens, per_request, 0)
        await asyncio.to_thread(count_ends, run, warm, per_request, 0)
        before, began = sum(process.cpu_times()[:2]), time.monotonic()
        await asyncio.to_thread(produce, run, count, tokens, per_request, warm)
        events, size = await asyncio.to_thread(count_ends, run, count, per_request, warm)
        wall, cpu = time.monotonic() - began, sum(process.cpu_times()[:2]) - before
    return {
        "requests_per_cpu_s": count / cpu,
        "events_per_cpu_s": events / cpu,
        "tokens_per_cpu_s": count * tokens / cpu,
        "events_per_request": events / count,
        "requests_per_s": count / wall,
        "cpu_share": cpu / wall,
        "bytes_per_event": size / events,
    }


async def first_tokens(servers: str, count: int, iteration_s: float, per_request: bool) -> list[float]:
    """Seconds from `submit` to the first tokens, one request after another."""
    run = Run(servers, "worker", iteration_s=iteration_s)
    options = {"per_request_topics": True} if per_request else {"response_topic": run.answers}
    found = []
    async with (
        run.process(),
        Client(
            servers, requests_topic=run.requests, control_topic=f"{run.name}.control", **options
        ) as client,
    ):
        for number in range(count + 20):
            began = time.perf_counter()
            request_id = await client.submit(PROMPT, max_tokens=2)
            first = None
            async for event in client.stream(request_id):
                if first is None and isinstance(event, TokensEvent):
                    first = time.perf_counter() - began
            if number >= 20 and first is not None:
                found.append(first)
    return found


async def direct(count: int, iteration_s: float) -> list[float]:
    """The same from the engine alone, called in this process."""
    from benchmarks.stub_engine import StubEngine

    from plait.engine.api import GenerationRequest, SamplingParams

    engine = StubEngine(iteration_s=iteration_s)
    found = []
    for number in range(count):
        first: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        ended = asyncio.Event()

        def hear(output: Any, first: Any = first, ended: Any = ended) -> None:
            if output.token_ids and not first.done():
                first.set_result(time.perf_counter())
            if output.finish is not None:
                ended.set()

        began = time.perf_counter()
        prompt = engine.tokenizer.encode(PROMPT)
        engine.submit(GenerationRequest(str(number), prompt, SamplingParams(max_tokens=2)), hear)
        found.append(await first - began)
        await ended.wait()
    await engine.stop()
    return found


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def measure(servers: str, args: argparse.Namespace) -> dict[str, Any]:
    n = args.requests
    result: dict[str, Any] = {}
    for name, what, count, tokens, per_request in (
        ("echo, 1 token", "echo", n, 1, False),
        ("worker, 1 token", "worker", n, 1, False),
        ("echo, 50 tokens", "echo", n // 4, 50, False),
        ("worker, 50 tokens", "worker", n // 4, 50, False),
        ("worker, 50 tokens, topic per request", "worker", n // 8, 50, True),
    ):
        if args.only and args.only not in name:
            continue
        profile = {"profile": True} if args.profile and what == "worker" else {}
        result[name] = await throughput(servers, what, count, tokens, per_request, **profile)
        print(f"{name}: { {k: round(v, 1) for k, v in result[name].items()} }", file=sys.stderr)
    if not args.only:
        alone = await direct(args.latencies, args.iteration_ms / 1000)
        for name, per_request in (("shared topic", False), ("topic per request", True)):
            through = await first_tokens(servers, args.latencies, args.iteration_ms / 1000, per_request)
            result[f"added to the first token, {name}"] = {
                f"p{int(share * 100)}_ms": 1000 * (percentile(through, share) - percentile(alone, share))
                for share in (0.5, 0.99)
            }
    return result


def show(runs: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {
        name: {key: round(statistics.median(r[name][key] for r in runs), 2) for key in values}
        for name, values in runs[0].items()
    }
    table = Table(title=f"medians of {len(runs)} runs; rates per second of CPU of the measured process")
    for heading in ("", "requests/s", "events/s", "tokens/s", "events/request", "CPU used"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, m in medians.items():
        if "events_per_cpu_s" in m:
            cells = [f"{m[k]:,.0f}" for k in ("requests_per_cpu_s", "events_per_cpu_s", "tokens_per_cpu_s")]
            table.add_row(name, *cells, f"{m['events_per_request']:.1f}", f"{m['cpu_share']:.0%}")
    console = Console(width=110)
    console.print(table)
    for name, m in medians.items():
        if "p50_ms" in m:
            console.print(f"{name}: p50 {m['p50_ms']:.1f} ms, p99 {m['p99_ms']:.1f} ms")
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--latencies", type=int, default=300, help="requests, one after another")
    parser.add_argument("--iteration-ms", type=float, default=5.0, help="of the stub engine, for latencies")
    parser.add_argument("--only", help="throughputs whose name contains this")
    parser.add_argument("--profile", action="store_true", help="the worker under cProfile, on standard error")
    parser.add_argument("--bootstrap-servers")
    parser.add_argument("--json", type=Path, help="write all runs there")
    args = parser.parse_args()
    with brokers(args.bootstrap_servers) as servers:
        runs = [asyncio.run(measure(servers, args)) for _ in range(args.runs)]
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1) + "\n")
    print(json.dumps(show(runs)))


if __name__ == "__main__":
    main()
