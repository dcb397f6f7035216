"""An engine without a model that runs as the real one does: each iteration gives every running request a token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from plait.engine.api import (
    EngineStats,
    Finish,
    GenerationRequest,
    ModelInfo,
    OnOutput,
    Output,
    Timeline,
    Told,
)

VOCABULARY = 1000


class StubTokenizer:
    def encode(self, text: str) -> list[int]:
        return [len(word) % VOCABULARY for word in text.split()]

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.encode(" ".join(message["content"] for message in messages))

    def decode(self, ids: list[int]) -> str:
        return " ok" * len(ids)


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    on_output: OnOutput
    timeline: Timeline
    left: int
    cancelled: bool = False


class StubEngine:
    """`seats` requests run at once; an iteration takes `iteration_s`, 0 for as fast as the event loop turns."""

    def __init__(self, seats: int = 64, iteration_s: float = 0.0) -> None:
        self.tokenizer = StubTokenizer()
        self.model = ModelInfo("stub", VOCABULARY, 100_000, "float32", "cpu", 100, 16)
        self.stats = EngineStats(total_blocks=100, free_blocks=100)
        self.ready = True
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seats = seats
        self._iteration_s = iteration_s
        self._requests: dict[str, _Running] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def heartbeat(self) -> float:
        return time.monotonic()

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        left = (request.sampling.max_tokens or 16) - len(request.output_token_ids)
        self._requests[request.request_id] = _Running(
            request, on_output, Timeline(arrived=request.arrival), left
        )
        self._work.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def cancel(self, request_id: str) -> None:
        if (running := self._requests.get(request_id)) is not None:
            running.cancelled = True

    def told(self, request: GenerationRequest) -> Told:
        return Told(" ok" * len(request.output_token_ids))

    def begun(self, request_id: str) -> bool:
        running = self._requests.get(request_id)
        return running is not None and running.timeline.scheduled is not None

    async def _run(self) -> None:
        while True:
            if not self._requests:
                self._work.clear()
                await self._work.wait()
            now = time.monotonic()
            chosen = list(self._requests.values())[: self._seats]
            for running in chosen:
                running.timeline.scheduled = running.timeline.scheduled or now
            await asyncio.sleep(self._iteration_s)
            for running in chosen:
                self._step(running)
            self.stats.iterations += 1

    def _step(self, running: _Running) -> None:
        now, timeline, request_id = time.monotonic(), running.timeline, running.request.request_id
        if running.left and not running.cancelled:
            running.left -= 1
            timeline.first_token = timeline.first_token or now
            running.on_output(Output(request_id, [7], " ok"))
        if running.left and not running.cancelled:
            return
        del self._requests[request_id]
        timeline.finished = now
        done = (running.request.sampling.max_tokens or 16) - running.left
        prompt = len(running.request.prompt_token_ids)
        reason = "cancelled" if running.cancelled else "length"
        running.on_output(Output(request_id, finish=Finish(reason, timeline, prompt, done)))
