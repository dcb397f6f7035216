"""What transactional delivery costs: `python -m benchmarks.delivery_cost`; prints a table and one line of JSON.

The same load, twice in turn, on one Apache Kafka (needs Java 17 and Maven) with a worker whose engine gives every
running request a token every 20 ms: 64 requests at once, 50 tokens each, one shared response topic. Delay is from the
timestamp of an event (when the worker made it) to its arrival at a `read_committed` consumer.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

REQUESTS, LENGTH, PACE, RUNS = 64, 50, 0.02, 2


def measure(bootstrap_servers: str, folder: Path, delivery: str) -> dict[str, float]:
    from worker_harness import Site
    from worker_process import WorkerProcess, requests

    site = Site(bootstrap_servers, worker={"delivery": delivery})
    topic = f"{site.name}.answers"

    async def run() -> dict[str, float]:
        await site.create(topic, 4)
        worker = await WorkerProcess(site, folder, PACE).start()
        reading = asyncio.create_task(asyncio.to_thread(read, bootstrap_servers, topic))
        await asyncio.sleep(1)
        before, start = worker.cpu_s(), time.monotonic()
        await site.produce(requests(site, [f"r{i}" for i in range(REQUESTS)], LENGTH, topic))
        delays, events, first = await reading
        took, cpu = time.monotonic() - start, worker.cpu_s() - before
        await worker.stop()
        return {
            "seconds": took,
            "events": events,
            "first_event_ms": 1000 * (first - start),
            "delay_p50_ms": statistics.median(delays),
            "delay_p99_ms": sorted(delays)[int(len(delays) * 0.99)],
            "worker_cpu_ms_per_1000_tokens": cpu * 1e6 / (REQUESTS * LENGTH),
        }

    return asyncio.run(run())


def read(bootstrap_servers: str, topic: str) -> tuple[list[float], int, float]:
    """Until all requests have ended: delays in ms, how many events, and when the first came."""
    from confluent_kafka import Consumer, TopicPartition

    options: dict[str, Any] = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": topic,
        "fetch.wait.max.ms": 10,
    }
    consumer = Consumer(options | {"isolation.level": "read_committed", "enable.auto.commit": False})
    partitions = consumer.list_topics(topic, 30).topics[topic].partitions
    consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
    delays: list[float] = []
    ended, first, until = set(), 0.0, time.monotonic() + 120
    while len(ended) < REQUESTS:
        assert time.monotonic() < until, f"{len(ended)} of {REQUESTS} requests have ended"
        for message in consumer.consume(500, 0.05):
            assert message.error() is None
            first = first or time.monotonic()
            delays.append(time.time() * 1000 - message.timestamp()[1])
            if dict(message.headers())["plait-type"] == b"done":
                ended.add(message.key())
    consumer.close()
    return delays, len(delays), first


def main() -> None:
    from kafka_broker import KafkaBroker

    found: dict[str, list[dict[str, float]]] = {"idempotent": [], "transactional": []}
    with tempfile.TemporaryDirectory(prefix="plait-delivery-") as folder:
        broker = KafkaBroker(Path(folder) / "kafka")
        try:
            broker.start()
            for _ in range(RUNS):
                for delivery, runs in found.items():
                    runs.append(measure(broker.bootstrap_servers, Path(folder), delivery))
        finally:
            broker.kill()
    means = {
        delivery: {name: round(statistics.mean(run[name] for run in runs), 1) for name in runs[0]}
        for delivery, runs in found.items()
    }
    print("| | idempotent | transactional |\n|---|---|---|")
    for name in means["idempotent"]:
        print(f"| {name} | {means['idempotent'][name]} | {means['transactional'][name]} |")
    print(json.dumps(means))


if __name__ == "__main__":
    main()
