"""`python -m benchmarks.soak --minutes 30`: idle and under load, does anything grow?

A worker process with a model's engine process (a random tiny model, so that the load is on the pipeline) on an Apache
Kafka of its own; a client that sends, cancels and leaves streams half-read. Looks every few seconds at the memory of
both processes, and at the end at the topics, tasks and spans that should be gone. A sixth of the time is warming up,
a sixth idle, four sixths under load. Slopes are in MiB per hour, by least squares over the second half of each phase.
The last line is one JSON object; the exit code is 1 when something leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiokafka.admin import AIOKafkaAdminClient
from benchmarks.pipeline import ROOT, brokers

from plait.schemas import TokensEvent
from plait.service.client import Client, RequestFailed
from plait.service.embedded import free_port

MIB = 2**20
TTL_S = 5
# Fragmentation and caches that fill let memory wander; more than this in an hour of the second half is a leak.
LIMIT_MIB_PER_HOUR = 20.0
MINUTES_FOR_A_SLOPE = 10.0
# aiokafka's connections have a task each, and come and go. A task lost with each request would be a thousand.
CONNECTIONS = 5


def make_model(folder: Path) -> str:
    """A Llama of two layers with random weights and a tokenizer of bytes."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny_models import save_tiny_llama

    return str(save_tiny_llama(folder))


class Watch:
    """Memory of a process and of its children, and how fast it grows."""

    def __init__(self, pid: int) -> None:
        self.worker = psutil.Process(pid)
        self.samples: list[tuple[float, float, float]] = []

    def look(self) -> None:
        engine = sum(child.memory_info().rss for child in self.worker.children(recursive=True))
        self.samples.append((time.monotonic(), self.worker.memory_info().rss / MIB, engine / MIB))

    def slopes(self, since: float) -> dict[str, float]:
        """MiB per hour over the second half of what was seen since then."""
        rows = [row for row in self.samples if row[0] >= since]
        rows = rows[len(rows) // 2 :]
        result = {}
        for column, name in ((1, "worker"), (2, "engine")):
            result[f"{name}_mib"] = round(rows[-1][column], 1)
            result[f"{name}_mib_per_hour"] = round(slope([(row[0], row[column]) for row in rows]) * 3600, 2)
        return result


def slope(points: list[tuple[float, float]]) -> float:
    """Of the line of least squares."""
    n = len(points)
    if n < 3:
        return 0.0
    mean_x, mean_y = (sum(p[i] for p in points) / n for i in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


async def metric(port: int, name: str) -> float:
    """The sum of a metric over its labels."""
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


async def one(client: Client, rng: random.Random) -> None:
    """A request of one of the kinds that users have."""
    kind = rng.random()
    request_id = await client.submit(
        "word " * rng.randint(1, 60),
        max_tokens=rng.randint(1, 40),
        priority=rng.randint(0, 9),
        ignore_eos=True,
    )
    with contextlib.suppress(RequestFailed):
        async for event in client.stream(request_id, timeout_s=120):
            if kind < 0.1 and isinstance(event, TokensEvent):
                await client.cancel(request_id)
            elif kind < 0.2:
                return  # a reader that goes away


async def load(servers: str, seconds: float, streams: int, rng: random.Random) -> int:
    """Keep so many requests going; half of them with a topic of their own."""
    until, sent = time.monotonic() + seconds, 0

    async def keep(client: Client) -> None:
        nonlocal sent
        while time.monotonic() < until:
            await one(client, rng)
            sent += 1

    async with Client(servers) as shared, Client(servers, per_request_topics=True) as own:
        await asyncio.gather(*(keep(own if number % 2 else shared) for number in range(streams)))
    return sent


async def phase(watch: Watch, seconds: float, work: Any = None) -> dict[str, float]:
    began = time.monotonic()
    task = asyncio.ensure_future(work) if work is not None else None
    pause = max(0.5, seconds / 200)
    while time.monotonic() < began + seconds:
        watch.look()
        await asyncio.sleep(pause)
    result = watch.slopes(began)
    if task is not None:
        result["requests"] = await task
    return result


async def ask(worker: asyncio.subprocess.Process) -> dict[str, Any]:
    """What the worker holds."""
    worker.send_signal(signal.SIGUSR1)
    assert worker.stdout is not None
    return json.loads(await asyncio.wait_for(worker.stdout.readline(), 30))


async def at_rest(worker: asyncio.subprocess.Process, servers: str) -> dict[str, Any]:
    """What it holds once nothing is in flight and no response topic is left."""
    async with asyncio.timeout(180):
        while (await ask(worker))["streams"] or await response_topics(servers):  # noqa: ASYNC110
            await asyncio.sleep(1)
    # A sweep or a connection may just be under way: what stays is in the least of some looks.
    looks = []
    for _ in range(10):
        looks.append(await ask(worker))
        await asyncio.sleep(2)
    return min(looks, key=lambda held: held["tasks"])


async def soak(servers: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    port = free_port()
    env = {
        "PLAIT_KAFKA_BOOTSTRAP_SERVERS": servers,
        "PLAIT_HTTP_PORT": str(port),
        "PLAIT_TOPICS_RESPONSE_TTL_S": str(TTL_S),
        "PLAIT_TOPICS_ORPHAN_AFTER_S": "60",
        "PLAIT_ENGINE_MODEL": model,
        "PLAIT_ENGINE_DTYPE": "float32",
        "PLAIT_ENGINE_NUM_BLOCKS": "400",
        # Small enough to be full when the looking begins: by default it would fill for hours, which is no leak.
        "PLAIT_ENGINE_SWAP_BYTES": "4000000",
        "PLAIT_ENGINE_THREADS": "1",
    }
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.soak_worker", cwd=ROOT, env=os.environ | env, stdout=PIPE
    )
    try:
        async with asyncio.timeout(300):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if await metric(port, "plait_assigned_partitions") > 0:
                        break
                await asyncio.sleep(0.5)
        watch, rng, unit = Watch(worker.pid), random.Random(1), args.minutes * 10.0
        await phase(watch, unit, load(servers, unit, args.streams, rng))
        before = await at_rest(worker, servers)
        result: dict[str, Any] = {"idle": await phase(watch, unit)}
        result["load"] = await phase(watch, 4 * unit, load(servers, 4 * unit, args.streams, rng))
        after = await at_rest(worker, servers)
        blocks = [await metric(port, f"plait_engine_{kind}_blocks") for kind in ("total", "free")]
        result["left"] = {
            "tasks": max(0, after["tasks"] - before["tasks"] - CONNECTIONS),
            "spans": after["open_spans"],
            "streams": after["streams"],
            "requests": await metric(port, "plait_in_flight_requests"),
            "engine_requests": await metric(port, "plait_engine_waiting")
            + await metric(port, "plait_engine_running"),
            "blocks": blocks[0] - blocks[1],
        }
        more = {name: n - before["tasks_by_name"].get(name, 0) for name, n in after["tasks_by_name"].items()}
        result["tasks"] = [before["tasks"], after["tasks"], {name: n for name, n in more.items() if n > 0}]
        result["objects"] = [before["objects"], after["objects"]]
        result["spans"] = after["spans"]
        return result
    finally:
        worker.terminate()
        await worker.wait()


async def response_topics(servers: str) -> list[str]:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        return [t for t in await admin.list_topics() if t.startswith("plait.responses.")]
    finally:
        await admin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=32, help="requests going at a time")
    parser.add_argument("--bootstrap-servers")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, brokers(args.bootstrap_servers) as servers:
        result = asyncio.run(soak(servers, make_model(Path(folder)), args))
    growth = [result[p][f"{who}_mib_per_hour"] for p in ("idle", "load") for who in ("worker", "engine")]
    long_enough = args.minutes >= MINUTES_FOR_A_SLOPE
    result["ok"] = not any(result["left"].values()) and (not long_enough or max(growth) < LIMIT_MIB_PER_HOUR)
    if args.json:
        args.json.write_text(json.dumps({"minutes": args.minutes, **result}, indent=1) + "\n")
    if not long_enough:
        print(f"slopes of less than {MINUTES_FOR_A_SLOPE:g} minutes say little", file=sys.stderr)
    print(json.dumps(result))
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
