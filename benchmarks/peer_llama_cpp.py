"""llama.cpp's server, over the job on stdin: streams of tokens over HTTP, one per request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time

import aiohttp
from benchmarks.peer_job import Answers, Job, Request, measure, read_job

from plait.service.embedded import free_port

START_SECONDS = 120


def serve(job: Job, port: int) -> subprocess.Popen[bytes]:
    # A context for each seat: that of the longest request, in whole blocks of 256 tokens.
    seats = min(job.seats, len(job.requests)) if job.together else 1
    context = seats * -(-(job.longest + 8) // 256) * 256
    threads = str(len(os.sched_getaffinity(0)))
    arguments = ["--model", job.model, "--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    arguments += ["--parallel", str(seats), "--ctx-size", str(context), "--threads", threads]
    # Each stream holds one of the server's threads for HTTP until it ends.
    streams = str(len(job.requests) + 4)
    arguments += ["--threads-batch", threads, "--threads-http", streams, "--cache-ram", "0"]
    return subprocess.Popen([job.program, *arguments], stdout=subprocess.DEVNULL)


async def until_ready(server: subprocess.Popen[bytes], session: aiohttp.ClientSession, url: str) -> None:
    give_up = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < give_up:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{url}/health") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"llama-server does not answer; its exit code: {server.returncode}")


async def one(session: aiohttp.ClientSession, url: str, r: Request, answers: Answers) -> None:
    body = {
        "prompt": r.prompt,
        "n_predict": r.output_tokens,
        "temperature": 0.0,
        "top_k": 1,
        "samplers": ["top_k"],
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "return_tokens": True,
    }
    predicted = 0
    async with session.post(f"{url}/completion", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                answers.add(r.id, event.get("tokens") or [])
                predicted = event.get("tokens_predicted") or predicted
    # Tokens that are no whole character yet come with later ones, or not at all.
    answers.by_id[r.id].tokens = predicted
    answers.by_id[r.id].last = time.perf_counter()


async def answer(session: aiohttp.ClientSession, url: str, requests: list[Request], answers: Answers) -> None:
    await asyncio.gather(*(one(session, url, r, answers) for r in requests))


async def connect() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout)


def version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True)
    return (done.stderr + done.stdout).strip().splitlines()[0]


def main() -> None:
    job, port = read_job(), free_port()
    url = f"http://127.0.0.1:{port}"
    server = serve(job, port)
    try:
        with asyncio.Runner() as runner:
            session = runner.run(connect())
            try:
                runner.run(until_ready(server, session, url))
                measure(job, lambda r, a: runner.run(answer(session, url, r, a)), version(job.program))
            finally:
                runner.run(session.close())
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
