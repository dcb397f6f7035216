"""Summarizes long texts through Kafka: their chunks first, at batch priority, then the summaries' summary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from plait.service.chunking import CountTokens, split
from plait.service.client import RequestFailed, Result, StreamBroken

BATCH_PRIORITY = 1
INSTRUCTION = "Summarize the following text in a few plain sentences. Keep names, numbers and results."
_ATTEMPTS = 6
_MAX_ROUNDS = 16


class Generates(Protocol):
    """What is needed of a client."""

    async def generate(self, prompt: str | None = None, **request: Any) -> Result: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How texts are summarized. A summary has at most a quarter of the tokens of a chunk, so that every round
    over the partial summaries makes the text shorter."""

    chunk_tokens: int = 800
    max_in_flight: int = 8
    instruction: str = INSTRUCTION
    model: str | None = None
    timeout_s: float = 600.0

    @property
    def summary_tokens(self) -> int:
        return max(16, min(200, self.chunk_tokens // 4))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one file: its summary, or why there is none."""

    path: Path
    summary: str = ""
    error: str = ""


class SummaryFailed(RuntimeError):
    """A text that cannot be summarized."""


@dataclass(slots=True)
class Summarizer:
    """Runs a plan. `planned` and `finished` count requests; `on_progress` is called when they change."""

    client: Generates
    count: CountTokens
    plan: Plan = field(default_factory=Plan)
    on_progress: Callable[[], None] = lambda: None
    planned: int = 0
    finished: int = 0
    _seats: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._seats = asyncio.Semaphore(self.plan.max_in_flight)

    async def run(self, paths: Sequence[Path]) -> AsyncIterator[Outcome]:
        """Outcomes as files get done; a failed file leaves the others alone. At most `max_in_flight` requests
        and as many files are open at a time."""
        waiting = iter(paths)
        running: set[asyncio.Task[Outcome]] = set()
        try:
            while True:
                while len(running) < self.plan.max_in_flight and (path := next(waiting, None)) is not None:
                    running.add(asyncio.create_task(self._file(path)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def text(self, text: str) -> str:
        """The summary of one text; raises SummaryFailed, RequestFailed, StreamBroken, TimeoutError or
        ValueError."""
        if not text.strip():
            raise SummaryFailed("there is no text in it")
        parts = await asyncio.to_thread(split, text, self.plan.chunk_tokens, self.count)
        for _ in range(_MAX_ROUNDS):
            partial = await self._all(parts)
            if len(partial) == 1:
                return partial[0]
            parts = await asyncio.to_thread(split, "\n\n".join(partial), self.plan.chunk_tokens, self.count)
            if len(parts) >= len(partial):
                break
        raise SummaryFailed("the partial summaries do not get shorter; raise --chunk-tokens")

    async def _file(self, path: Path) -> Outcome:
        try:
            text = (await asyncio.to_thread(path.read_bytes)).decode("utf-8-sig")
            return Outcome(path, summary=await self.text(text))
        except UnicodeDecodeError as error:
            return Outcome(path, error=f"is not UTF-8 (byte {error.start})")
        except OSError as error:
            return Outcome(path, error=error.strerror or str(error))
        except (SummaryFailed, RequestFailed, StreamBroken, TimeoutError, ValueError) as error:
            return Outcome(path, error=str(error))

    async def _all(self, parts: list[str]) -> list[str]:
        self.planned += len(parts)
        self.on_progress()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(part)) for part in parts]
        except BaseExceptionGroup as failures:
            raise _first(failures) from failures
        return [task.result() for task in tasks]

    async def _one(self, part: str) -> str:
        async with self._seats:
            result = await self._ask(part)
        self.finished += 1
        self.on_progress()
        summary = result.text.strip()
        if not summary:
            raise SummaryFailed("the model answered a part with nothing")
        return summary

    async def _ask(self, part: str) -> Result:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self.client.generate(
                    messages=[{"role": "user", "content": f"{self.plan.instruction}\n\n{part.strip()}"}],
                    model=self.plan.model,
                    priority=BATCH_PRIORITY,
                    timeout_s=self.plan.timeout_s,
                    max_tokens=self.plan.summary_tokens,
                    temperature=0.0,
                    frequency_penalty=0.3,
                )
            except RequestFailed as failure:
                if not failure.retryable or attempt == _ATTEMPTS:
                    raise
                await asyncio.sleep((failure.retry_after_ms or 500 * attempt) / 1000)
        raise AssertionError("unreachable")


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    failure = failures.exceptions[0]
    return _first(failure) if isinstance(failure, BaseExceptionGroup) else failure
