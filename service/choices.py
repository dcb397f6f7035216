"""The sequences of one request on the engine, heard as one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from plait.engine.api import Finish, GenerationRequest, Output, RequestRefused, Timeline
from plait.service.answers import Piece, merge
from plait.service.engine_port import EngineLike
from plait.service.history import Published
from plait.service.joint import Joint, Mismatch

# How long the engine may take to end a sequence that was cancelled, before the answer goes out without it.
CANCEL_GRACE_S = 2.0


class Choices:
    """Submits `n` sequences and gathers what they say until each has finished."""

    def __init__(self, engine: EngineLike) -> None:
        self.finishes: dict[int, Finish] = {}
        self.submitted = False
        self._engine = engine
        self._running: dict[int, str] = {}  # engine ids of unfinished sequences, by choice
        self._generated: Counter[int] = Counter()  # tokens so far, by choice
        self._published: dict[int, Published] = {}
        self._joints: dict[int, Joint] = {}
        self._news: list[tuple[int, Output]] = []
        self._wake = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self._given_up = False

    @property
    def resumed(self) -> int:
        """Tokens that were published before."""
        return sum(len(found.token_ids) for found in self._published.values())

    def resume(self, published: Sequence[Published]) -> None:
        """Begin after what was published of each choice."""
        for choice, found in enumerate(published):
            self._generated[choice] = len(found.token_ids)
            self._published[choice] = found

    def submit(self, sequences: Sequence[GenerationRequest]) -> None:
        """Raises RequestRefused when the engine takes one of them not; the others are cancelled then. Raises
        Mismatch when a choice cannot be resumed."""
        for choice, sequence in enumerate(sequences):
            found = self._published.get(choice)
            if found is not None and (found.token_ids or found.text):
                sequence.output_token_ids = list(found.token_ids)
                shorter = replace(sequence, output_token_ids=found.token_ids[:-1])
                before = partial(self._engine.told, shorter)
                self._joints[choice] = Joint(found, self._engine.told(sequence), before, sequence.sampling)
        self.submitted = True
        for choice, sequence in enumerate(sequences):
            self._running[choice] = sequence.request_id
            try:
                self._engine.submit(sequence, partial(self._hear, choice))
            except RequestRefused:
                del self._running[choice]
                self.cancel()
                raise

    async def next(self) -> list[Piece]:
        """What has come since, in order; empty once nothing more will."""
        while self._news or (self._running and not self._given_up):
            await self._wake.wait()
            self._wake.clear()
            news, self._news = self._news, []
            pieces = merge(news)
            for piece in pieces:
                self._generated[piece.choice] += len(piece.token_ids)
            if pieces:
                return pieces
        return []

    def stop(self) -> None:
        """Cancel what runs; `next` says what came until then."""
        self.cancel()
        if self._running:
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(CANCEL_GRACE_S, self._give_up))

    def cancel(self) -> None:
        for engine_id in list(self._running.values()):
            self._engine.cancel(engine_id)

    def close(self) -> None:
        """Cancel what runs and listen no more."""
        for timer in self._timers:
            timer.cancel()
        self.cancel()
        self._given_up = True

    @property
    def begun(self) -> bool:
        """Whether the engine computes one of them."""
        return any(map(self._engine.begun, self._running.values()))

    @property
    def error(self) -> Finish | None:
        return next((f for f in self.finishes.values() if f.reason == "error"), None)

    @property
    def cut(self) -> bool:
        """Whether a sequence has not come to its own end."""
        ended = self.finishes.values()
        return bool(self._running) or not ended or any(f.reason == "cancelled" for f in ended)

    def outcomes(self, n: int, arrived: float, now: float) -> list[Finish]:
        """How each choice ended; one that the engine said nothing of counts as cancelled now."""
        return [
            self.finishes.get(choice)
            or Finish("cancelled", Timeline(arrived, finished=now), 0, self._generated[choice])
            for choice in range(n)
        ]

    def _hear(self, choice: int, output: Output) -> None:
        """Called by the engine, in the event loop."""
        if self._given_up:
            return
        if (joint := self._joints.get(choice)) is not None:
            try:
                joint.take(output)
            except Mismatch as error:
                self._joints.clear()
                timeline = output.finish.timeline if output.finish else Timeline(0.0)
                output = Output(
                    output.request_id, finish=Finish("error", timeline, 0, 0, 0, None, str(error))
                )
        self._news.append((choice, output))
        if output.finish is not None:
            self._running.pop(choice, None)
            self.finishes[choice] = output.finish
            if output.finish.reason == "error":
                self.stop()
        self._wake.set()

    def _give_up(self) -> None:
        self._given_up = True
        self._wake.set()
