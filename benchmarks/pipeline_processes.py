"""What `benchmarks.pipeline` measures, a process each: a worker with a stub engine, and a bare aiokafka echo.

`python -m benchmarks.pipeline_processes worker|echo JSON`; a line "ready" says that it reads.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import logging
import pstats
import signal
import sys
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from benchmarks.stub_engine import StubEngine

from plait.schemas import DoneEvent, Timing, Usage, decode_request, encode, headers, tokens_event_bytes
from plait.service.settings import Settings
from plait.service.worker import Worker


async def worker(job: dict[str, Any]) -> None:
    settings = Settings.load(
        kafka={"bootstrap_servers": job["servers"], "group_id": job["name"]},
        topics={
            "requests": job["requests"],
            "control": f"{job['name']}.control",
            "dlq": f"{job['name']}.dlq",
            "named_responses": r".+\.answers",
            "request_partitions": 4,
        },
        worker={"delivery": job["delivery"]} if "delivery" in job else {},
        http={"enabled": False},
    )
    running = Worker(settings, StubEngine(seats=job["seats"], iteration_s=job["iteration_s"]))
    task = asyncio.create_task(running.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.stop)
    await running.ready.wait()
    print("ready", flush=True)
    await task


async def echo(job: dict[str, Any]) -> None:
    """What a program without plait's promises needs at the least: the same bytes in, the same events out, and an
    offset committed after they are durable."""
    consumer = AIOKafkaConsumer(
        job["requests"],
        bootstrap_servers=job["servers"],
        group_id=job["name"],
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    producer = AIOKafkaProducer(bootstrap_servers=job["servers"], acks="all", enable_idempotence=True)
    await consumer.start()
    await producer.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("ready", flush=True)
    while not stop.is_set():
        batch = await consumer.getmany(timeout_ms=200)
        sent = []
        for records in batch.values():
            for record in records:
                request, kind = decode_request(record.value, None)
                for index in range(request.sampling.max_tokens or 1):
                    value = tokens_event_bytes(request.request_id, index, 0, 1, [7], " ok", None, kind)
                    sent.append(await _send(producer, job["answers"], record.key, value, "tokens"))
                sent.append(
                    await _send(producer, job["answers"], record.key, _done(request.request_id), "done")
                )
        if sent:
            await asyncio.gather(*sent)
            await consumer.commit()
    await producer.stop()
    await consumer.stop()


async def _send(producer: Any, topic: str, key: bytes, value: bytes, kind: str) -> Any:
    given = [(headers.CONTENT_TYPE, b"application/msgpack"), (headers.PLAIT_TYPE, kind.encode())]
    return await producer.send(topic, value, key=key, headers=given)


def _done(request_id: str) -> bytes:
    return encode(
        DoneEvent(
            request_id=request_id,
            index=0,
            epoch=1,
            finish_reason="length",
            finish_reasons=["length"],
            usage=Usage(prompt_tokens=8, completion_tokens=1),
            timing=Timing(queue_ms=1, ttft_ms=1, tpot_ms=1, total_ms=1),
        )
    )


def main() -> None:
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # on topics that come and go
    what, job = sys.argv[1], json.loads(sys.argv[2])
    run = {"worker": worker, "echo": echo}[what]
    if not job.get("profile"):
        asyncio.run(run(job))
        return
    profile = cProfile.Profile()
    profile.runcall(asyncio.run, run(job))
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
