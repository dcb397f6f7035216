"""Submits requests to an EngineProcess and keeps what comes, checking the form of every output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from plait.engine.api import Finish, GenerationRequest, Output
from plait.engine.process import EngineProcess


class Run:
    """One request. `at_token(n)` is called when its n-th token has come."""

    def __init__(
        self, engine: EngineProcess, request: GenerationRequest, at_token: Callable[[int], None] | None = None
    ):
        self.request = request
        self.at_token = at_token
        self.tokens: list[int] = []
        self.text = ""
        self.done: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        engine.submit(request, self._hear)

    def _hear(self, output: Output) -> None:
        assert output.request_id == self.request.request_id
        assert not self.done.done(), "an output after the finish"
        assert output.token_ids or output.finish, "an output that says nothing"
        self.tokens += output.token_ids
        self.text += output.text
        if output.finish:
            self.done.set_result(output.finish)
        elif self.at_token:
            self.at_token(len(self.tokens))

    @property
    def seen(self) -> tuple[list[int], str, str | None]:
        return self.tokens, self.text, self.done.result().reason if self.done.done() else None


async def finished(*runs: Run) -> list[Finish]:
    return await asyncio.wait_for(asyncio.gather(*(run.done for run in runs)), 120)
