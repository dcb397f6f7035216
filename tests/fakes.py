"""An engine without a model: deterministic, controllable, and of the same interface as the real one."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from plait.engine.api import (
    EngineStats,
    Finish,
    GenerationRequest,
    ModelInfo,
    OnOutput,
    Output,
    Timeline,
    TokenLogprob,
    Told,
    check,
)

VOCABULARY = 1000


class FakeTokenizer:
    """One token per word; a word's id is the sum of its bytes, modulo the vocabulary."""

    def encode(self, text: str) -> list[int]:
        return [sum(word.encode()) % VOCABULARY for word in text.split()]

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        if any(message["content"] == "refuse" for message in messages):
            raise ValueError("the chat template refuses this message")
        return self.encode(" ".join(f"{m['role']} {m['content']}" for m in messages))

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {i}" for i in ids)


def fake_tokens(request: GenerationRequest, default: int = 8) -> list[int]:
    """What FakeEngine generates: it depends on prompt, seed and position alone."""
    count = request.sampling.max_tokens or default
    base = sum(request.prompt_token_ids) + request.sampling.seed
    return [(base + 7 * i) % VOCABULARY for i in range(count)]


@dataclass
class _Sequence:
    request: GenerationRequest
    on_output: OnOutput
    timeline: Timeline
    tokens: list[int]
    at: int = 0
    cancelled: bool = False
    task: asyncio.Task[None] | None = None


@dataclass
class FakeEngine:
    """Generates `fake_tokens`, `per_output` at a time, with `pace` seconds between outputs.

    `hold()` stops all progress until `release()`. `fail_next(code)` lets the next submitted request end with
    an error after its first output. `preempt` adds one preemption to each timeline. `deaf` ignores `cancel`.
    `crash()` fails the engine for good. `max_running` bounds how many make progress at once; the others wait.
    """

    pace: float = 0.0
    per_output: int = 1
    max_tokens_total: int = 100_000
    max_running: int = 64
    preempt: bool = False
    deaf: bool = False
    text_per_token: str | None = None
    reason: str = "length"
    retry_after: float | None = None
    name: str = "fake"
    ready: bool = True
    submitted: list[GenerationRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.model = ModelInfo(self.name, VOCABULARY, self.max_tokens_total, "float32", "cpu", 100, 16)
        self.stats = EngineStats(total_blocks=100, free_blocks=100)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sequences: dict[str, _Sequence] = {}
        self._places = asyncio.Semaphore(self.max_running)
        self._going = asyncio.Event()
        self._going.set()
        self._errors: list[str] = []
        self._count = itertools.count()

    @property
    def heartbeat(self) -> float:
        return time.monotonic()

    @property
    def idle(self) -> bool:
        return not self._sequences

    async def launch(self) -> None: ...

    async def start(self) -> None:
        self.ready = True

    async def stop(self) -> None:
        self.ready = False
        for sequence in list(self._sequences.values()):
            if sequence.task is not None:
                sequence.task.cancel()

    def hold(self) -> None:
        self._going.clear()

    def release(self) -> None:
        self._going.set()

    def fail_next(self, code: str = "internal") -> None:
        self._errors.append(code)

    def crash(self, message: str = "the engine cannot be brought back") -> None:
        self.ready = False
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "error", "internal", message)
        if not self.failed.done():
            self.failed.set_exception(RuntimeError(message))
            self.failed.exception()

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        assert request.request_id not in self._sequences, "engine ids are unique"
        check(request, self.model)
        self.submitted.append(request)
        tokens = fake_tokens(request)
        timeline = Timeline(arrived=request.arrival or time.monotonic())
        sequence = _Sequence(request, on_output, timeline, tokens, at=len(request.output_token_ids))
        self._sequences[request.request_id] = sequence
        error = self._errors.pop(0) if self._errors else None
        sequence.task = asyncio.get_running_loop().create_task(self._run(sequence, error))

    def told(self, request: GenerationRequest) -> Told:
        return Told(self._text(request.output_token_ids))

    def begun(self, request_id: str) -> bool:
        sequence = self._sequences.get(request_id)
        return sequence is not None and sequence.timeline.scheduled is not None

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids) if self.text_per_token is None else self.text_per_token * len(ids)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        sequence = self._sequences.get(request_id)
        if sequence is not None and not self.deaf:
            asyncio.get_running_loop().call_soon(self._finish, sequence, "cancelled")

    async def _run(self, sequence: _Sequence, error: str | None) -> None:
        async with self._places:
            await self._going.wait()
            sequence.timeline.scheduled = time.monotonic()
            if self.preempt:
                sequence.timeline.preemptions.append(time.monotonic())
            while sequence.at < len(sequence.tokens):
                await asyncio.sleep(self.pace)
                await self._going.wait()
                self._emit(sequence)
                if error is not None:
                    self._finish(sequence, "error", error, "made to fail")
                    return
            self._finish(sequence, self.reason)

    def _emit(self, sequence: _Sequence) -> None:
        ids = sequence.tokens[sequence.at : sequence.at + self.per_output]
        sequence.at += len(ids)
        if sequence.timeline.first_token is None:
            sequence.timeline.first_token = time.monotonic()
        self.stats.generated_tokens += len(ids)
        text = self._text(ids)
        logprobs = None
        if sequence.request.sampling.logprobs is not None:
            logprobs = [TokenLogprob(i, -0.5, [(i, -0.5)]) for i in ids]
        sequence.on_output(Output(sequence.request.request_id, ids, text, logprobs))

    def _finish(
        self, sequence: _Sequence, reason: Any, code: str | None = None, message: str | None = None
    ) -> None:
        if self._sequences.pop(sequence.request.request_id, None) is None:
            return
        if sequence.task is not None and sequence.task is not asyncio.current_task():
            sequence.task.cancel()
        sequence.timeline.finished = time.monotonic()
        finish = Finish(
            reason,
            sequence.timeline,
            prompt_tokens=len(sequence.request.prompt_token_ids),
            completion_tokens=sequence.at,
            code=code,
            message=message,
            retry_after=self.retry_after,
        )
        sequence.on_output(Output(sequence.request.request_id, finish=finish))
