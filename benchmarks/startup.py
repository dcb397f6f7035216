"""From the start of `plait worker` to ready, beside an embedded broker: `python -m benchmarks.startup [--runs N]`.

Prints medians: seconds until /readyz answers, and what the engine's process says of its part. The model is in the cache
before the clock starts. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import time
from asyncio.subprocess import DEVNULL, PIPE

from benchmarks.peer_plait_kafka import PLAIT, running, until_ready

from plait.engine.config import EngineConfig
from plait.engine.loader import load
from plait.service.embedded import free_port

PART = re.compile(r"(imports|configuration|weights|warm-up) ([0-9.]+) s")


async def start_once(servers: str) -> dict[str, float]:
    port = free_port()
    began = time.monotonic()
    worker = await asyncio.create_subprocess_exec(
        *(str(PLAIT), "worker", "--bootstrap-servers", servers, "--http-port", str(port)),
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
    )
    log = asyncio.create_task(worker.stderr.read())  # type: ignore[union-attr]
    try:
        await until_ready(worker, f"http://127.0.0.1:{port}/readyz")
        ready = time.monotonic() - began
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.terminate()
        await worker.wait()
    parts = {name: float(seconds) for name, seconds in PART.findall((await log).decode())}
    return {"ready": ready, **parts}


async def measure(runs: int) -> list[dict[str, float]]:
    async with running("dev", "--no-worker") as broker:
        assert broker.stdout
        servers = (await broker.stdout.readline()).decode().strip()
        return [await start_once(servers) for _ in range(runs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    load(EngineConfig())
    rows = asyncio.run(measure(runs))
    medians = {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}
    print(f"ready after {medians['ready']} s (of {runs}: {sorted(round(row['ready'], 2) for row in rows)})")
    print("the engine's process: " + ", ".join(f"{k} {v} s" for k, v in medians.items() if k != "ready"))
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
