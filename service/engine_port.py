"""What the worker needs of an engine; `plait.engine.process.EngineProcess` and the tests' fake fulfil it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from plait.engine.api import EngineStats, GenerationRequest, ModelInfo, OnOutput, Told


class TokenizerLike(Protocol):
    """Safe to call from a thread."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Raises ValueError when the model has no chat template, or the template refuses the messages."""

    def decode(self, ids: list[int]) -> str: ...


class EngineLike(Protocol):
    """An engine that is started and stopped by whoever owns it, and used from one event loop."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def ready(self) -> bool: ...

    @property
    def heartbeat(self) -> float:
        """Monotonic time of its last sign of life."""

    @property
    def failed(self) -> asyncio.Future[None]:
        """Set with an exception when the engine cannot be brought back."""

    async def launch(self) -> None:
        """Begin with what of a start needs no waiting for; `start` does it otherwise."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Raises plait.engine.api.RequestRefused. `on_output` is called in the event loop; exactly one
        Output per request carries `finish`, always the last."""

    def cancel(self, request_id: str) -> None:
        """The request then ends with Finish(reason="cancelled"); an unknown id is ignored."""

    def told(self, request: GenerationRequest) -> Told:
        """The text of the request's `output_token_ids`, as the outputs that brought them told it."""

    def begun(self, request_id: str) -> bool:
        """Whether the engine has begun to compute this request."""
