"""What the workers of kill rounds are asked, and what an undisturbed one answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from engine_runs import Run, finished
from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.process import EngineProcess
from plait.service.local import make_engine
from plait.service.settings import EngineSettings, Settings
from worker_harness import Site, request
from worker_process import expected, requests

Messages = list[tuple[bytes, Any]]
Answer = tuple[list[int], str]  # tokens and text


class Load(Protocol):
    """`pace` is that of the workers' fake engine; without one they run the engine that `engine` sets up."""

    streams: int
    length: int
    pace: float | None
    session_ms: int
    engine: dict[str, Any]

    async def prepare(self) -> None:
        """Called once, while the first worker starts."""

    def requests(self, site: Site, names: Iterable[str], topic: str | None) -> Messages: ...

    def expected(self, name: str) -> Answer: ...


class FakeLoad:
    """The tests' deterministic engine."""

    streams, length, pace, session_ms = 50, 60, 0.05, 1000
    engine: dict[str, Any] = {}  # noqa: RUF012 the protocol's

    async def prepare(self) -> None: ...

    def requests(self, site: Site, names: Iterable[str], topic: str | None) -> Messages:
        return requests(site, list(names), self.length, topic)

    def expected(self, name: str) -> Answer:
        tokens = expected(name, self.length)
        return tokens, "".join(f" {token}" for token in tokens)


OPENINGS = [
    "The sea was",
    "Once upon a time there was a king who",
    "A list of three fruits:",
    "def add(a, b):",
    "In the year 1905 a young clerk in Bern",
]


class ModelLoad:
    """A real model in float32, greedy; before the rounds an engine that is left alone answers the same prompts."""

    pace, session_ms = None, 3000

    def __init__(self, model: str = "smollm2", streams: int = 20, length: int = 40) -> None:
        self.streams = streams
        self.length = length
        self.engine = {"model": model, "dtype": "float32", "num_blocks": 128, "max_running": 32}
        self._answers: dict[str, Answer] = {}

    async def prepare(self) -> None:
        settings = Settings(engine=EngineSettings(**self.engine))
        engine: EngineProcess = make_engine(settings)
        await engine.start()
        try:
            sampling = SamplingParams(**self._sampling)
            prompts = [self._prompt(f"-{i}") for i in range(self.streams)]
            runs = [Run(engine, GenerationRequest(p, engine.tokenizer.encode(p), sampling)) for p in prompts]
            await finished(*runs)
            self._answers = {run.request.request_id: (run.tokens, run.text) for run in runs}
        finally:
            await engine.stop()

    def requests(self, site: Site, names: Iterable[str], topic: str | None) -> Messages:
        named = {} if topic is None else {"response_topic": topic}
        return [
            request(
                name,
                "json" if i % 2 else "msgpack",
                prompt=self._prompt(name),
                sampling=self._sampling,
                **named,
            )
            for i, name in enumerate(names)
        ]

    def expected(self, name: str) -> Answer:
        return self._answers[self._prompt(name)]

    @property
    def _sampling(self) -> dict[str, Any]:
        return {"temperature": 0.0, "max_tokens": self.length, "ignore_eos": True}

    def _prompt(self, name: str) -> str:
        number = int(name.rpartition("-")[2])
        return f"{number}. {OPENINGS[number % len(OPENINGS)]}"
