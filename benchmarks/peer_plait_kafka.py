"""plait through Kafka, over the job on stdin: embedded broker, worker and this client, a process each."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path

import aiohttp
from benchmarks.peer_job import Answers, Request, measure, read_job

from plait.schemas import TokensEvent
from plait.service.client import Client
from plait.service.embedded import free_port

PLAIT = Path(sys.executable).with_name("plait")
START_SECONDS = 300


@contextlib.asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(str(PLAIT), *arguments, stdin=DEVNULL, stdout=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def until_ready(worker: Process, url: str) -> None:
    async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as session:
        while worker.returncode is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the worker ended with code {worker.returncode}")


async def answer(client: Client, requests: list[Request], answers: Answers) -> None:
    async def one(r: Request) -> None:
        request_id = await client.submit(
            prompt_token_ids=r.prompt, max_tokens=r.output_tokens, temperature=0.0, ignore_eos=True
        )
        async for event in client.stream(request_id):
            if isinstance(event, TokensEvent):
                answers.add(r.id, event.token_ids)

    await asyncio.gather(*(one(r) for r in requests))


async def start(cleanup: contextlib.AsyncExitStack, seats: int) -> Client:
    broker = await cleanup.enter_async_context(running("dev", "--no-worker"))
    assert broker.stdout
    servers = (await broker.stdout.readline()).decode().strip()
    port = free_port()
    worker = await cleanup.enter_async_context(
        running(
            *("worker", "--bootstrap-servers", servers, "--http-port", str(port)),
            *("--dtype", "bfloat16", "--max-running", str(seats)),
        )
    )
    await until_ready(worker, f"http://127.0.0.1:{port}/readyz")
    return await cleanup.enter_async_context(Client(servers))


def main() -> None:
    job = read_job()
    with asyncio.Runner() as runner:
        cleanup = contextlib.AsyncExitStack()
        try:
            client = runner.run(start(cleanup, job.seats))
            measure(job, lambda r, a: runner.run(answer(client, r, a)), version("plait"))
        finally:
            runner.run(cleanup.aclose())


if __name__ == "__main__":
    main()
