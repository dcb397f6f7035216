"""The engine in a process of its own, seen from the process that talks to Kafka.

The parent keeps what each request has so far. When the engine dies it is started again and gets every request
back with the tokens already generated; since noise depends on (seed, position) alone, each goes on as if
nothing had happened, and the reader of its outputs sees neither a gap nor a repetition.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from plait.engine.api import (
    EngineStats,
    Finish,
    GenerationRequest,
    ModelInfo,
    OnOutput,
    Output,
    RequestRefused,
    Timeline,
    TokenLogprob,
    check,
)
from plait.engine.config import EngineConfig
from plait.engine.link import HEADER, pack, request_out, unpack
from plait.engine.models import resolve
from plait.engine.text import TextStream
from plait.engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)
START_ATTEMPTS = 3
STOP_SECONDS = 5.0


class EngineFailed(RuntimeError):
    """The engine cannot be started, or not be brought back; the message says why."""


@dataclass(slots=True)
class Live:
    """A request between submission and finish."""

    request: GenerationRequest
    on_output: OnOutput
    text: TextStream
    timeline: Timeline
    produced: list[int] = field(default_factory=list)
    running: bool = False
    crashes: int = 0


class EngineProcess:
    """Start it, submit requests, get outputs by callback in the event loop. `failed` ends when all is lost."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.stats = EngineStats()
        self.heartbeat = time.monotonic()
        self.ready = False
        self.restarts = 0
        self.live: dict[str, Live] = {}
        self._stopping = False
        self._child: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load the model and come up. Raises EngineFailed, ModelUnavailable."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._path = await asyncio.to_thread(resolve, self.config.model)
        opening = asyncio.ensure_future(self._spawn())
        try:
            self.tokenizer = await asyncio.to_thread(Tokenizer, self._path)
        finally:
            reader = await opening
        # The output matrix is often padded beyond the tokens there are.
        self.model = replace(
            self.model, vocab_size=min(self.model.vocab_size, self.tokenizer.vocab_size), name=self.config.model
        )
        self._tasks = [asyncio.create_task(self._supervise(reader)), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        """End the process. Requests that are still live get no further output."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._child and self._child.returncode is None:
            self._send(["stop"])
            try:
                await asyncio.wait_for(self._child.wait(), STOP_SECONDS)
            except TimeoutError:
                self._child.kill()
                await self._child.wait()
        if self._writer:
            self._writer.close()
        self.ready = False

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Queue a request; `on_output` gets its outputs, the last one with a finish. Raises RequestRefused."""
        if request.request_id in self.live:
            raise ValueError(f"request id {request.request_id!r} is in flight")
        check(request, self.model)
        if len(self.live) >= self.config.max_running + self.config.max_waiting:
            raise RequestRefused("overloaded", "max_waiting", f"{len(self.live)} requests are in flight already")
        if not request.arrival:
            request.arrival = time.monotonic()
        text = TextStream(self.tokenizer, request.sampling, request.prompt_token_ids)
        for token in request.output_token_ids:
            text.push(token)
        live = Live(request, on_output, text, Timeline(request.arrival), list(request.output_token_ids))
        self.live[request.request_id] = live
        self._send(["add", request_out(request)])

    def cancel(self, request_id: str) -> None:
        """End a request early; it then finishes as cancelled. Unknown ids are ignored."""
        live = self.live.get(request_id)
        if live is None:
            return
        if self.ready:
            self._send(["cancel", request_id, False])
        else:
            self._end(live, "cancelled")

    async def _spawn(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            config = asdict(replace(self.config, model=str(self._path)))
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "plait.engine.child", str(theirs.fileno()), json.dumps(config)),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=environment(self.config),
                # Ctrl-C is for the parent, which then drains: the engine must outlive it.
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            kind, payload = await receive(reader)
        except asyncio.IncompleteReadError:
            code = await self._child.wait()
            raise EngineFailed(f"the engine process ended with code {code} while it loaded the model") from None
        if kind == "failed":
            await self._child.wait()
            raise EngineFailed(payload)
        self.model = ModelInfo(**payload)
        self.heartbeat = time.monotonic()
        self.ready = True
        return reader

    async def _supervise(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                while True:
                    self._receive(await receive(reader))
            except (asyncio.IncompleteReadError, ConnectionError):
                self.ready = False
            assert self._child is not None and self._writer is not None
            self._writer.close()
            code = await self._child.wait()
            log.error("the engine process ended with code %s; starting it again", code)
            self._crashed()
            try:
                reader = await self._respawn()
            except EngineFailed as error:
                for live in list(self.live.values()):
                    self._end(live, "error", "internal", f"the engine cannot be brought back: {error}")
                self.failed.set_exception(error)
                # Whoever watches `failed` is told; asyncio need not warn as well.
                self.failed.exception()
                return

    async def _respawn(self) -> asyncio.StreamReader:
        vocab_size = self.model.vocab_size
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                reader = await self._spawn()
                break
            except EngineFailed as error:
                log.error("start %d of %d failed: %s", attempt, START_ATTEMPTS, error)
                if attempt == START_ATTEMPTS:
                    raise
                await asyncio.sleep(attempt)
        self.model = replace(self.model, vocab_size=vocab_size, name=self.config.model)
        self.restarts += 1
        for live in self.live.values():
            live.timeline.restarts.append(time.monotonic())
            self._send(["add", request_out(replace(live.request, output_token_ids=list(live.produced)))])
        return reader

    def _crashed(self) -> None:
        """Count the crash against those who were running; the ones that were in too many end here."""
        for live in list(self.live.values()):
            if live.text.stopped:
                self._end(live, "stop")
                continue
            live.crashes += live.running
            live.running = False
            if live.crashes > self.config.max_restarts:
                message = f"the engine process died {live.crashes} times while it ran this request"
                self._end(live, "error", "internal", message)

    def _receive(self, message: list[Any]) -> None:
        self.heartbeat = time.monotonic()
        if message[0] == "running":
            for request_id in message[1]:
                if live := self.live.get(request_id):
                    live.running = True
            return
        _, rows, stats = message
        self.stats = EngineStats(**{**stats, "restarts": self.restarts})
        for request_id, tokens, logprob, finish in rows:
            if live := self.live.get(request_id):
                try:
                    self._advance(live, tokens, logprob, finish)
                except Exception:
                    log.exception("the output of request %s cannot be delivered", request_id)

    def _advance(self, live: Live, tokens: list[int], logprob: list[Any] | None, finish: list[Any] | None) -> None:
        if live.text.stopped:
            tokens = []
        text = ""
        for token in tokens:
            live.produced.append(token)
            live.crashes = 0
            if not (finish and finish[0] == "stop" and not live.request.sampling.include_stop_str_in_output):
                text += live.text.push(token)
            if live.timeline.first_token is None:
                live.timeline.first_token = time.monotonic()
        if live.text.stopped and finish is None and tokens:
            self._send(["cancel", live.request.request_id, True])
        details = None
        if logprob and tokens:
            token, value, top = logprob
            details = [TokenLogprob(token, value, [(i, p) for i, p in top])]
        if finish:
            self._close(live, tokens, text, details, finish)
        elif tokens:
            live.on_output(Output(live.request.request_id, tokens, text, details))

    def _close(
        self, live: Live, tokens: list[int], text: str, details: list[TokenLogprob] | None, finish: list[Any]
    ) -> None:
        reason, message, scheduled, first, finished, preemptions, cached = finish
        t = live.timeline
        t.scheduled = t.scheduled or scheduled
        t.first_token = min((x for x in (t.first_token, first) if x is not None), default=None)
        t.finished = finished or time.monotonic()
        t.preemptions += preemptions
        if live.text.stopped:
            reason = "stop"
        code = "internal" if reason == "error" else None
        self._end(live, reason, code, message, tokens, text, details, cached)

    def _end(
        self,
        live: Live,
        reason: Any,
        code: str | None = None,
        message: str | None = None,
        tokens: list[int] | None = None,
        text: str = "",
        details: list[TokenLogprob] | None = None,
        cached: int = 0,
    ) -> None:
        request = live.request
        del self.live[request.request_id]
        live.timeline.finished = live.timeline.finished or time.monotonic()
        finish = Finish(
            reason, live.timeline, len(request.prompt_token_ids), len(live.produced), cached, code, message
        )
        live.on_output(Output(request.request_id, tokens or [], text + live.text.finish(), details, finish))

    async def _watch(self) -> None:
        """Kill an engine that has gone silent: what follows is what follows any crash."""
        while True:
            await asyncio.sleep(1.0)
            silent = time.monotonic() - self.heartbeat
            if self.ready and silent > self.config.stall_seconds and self._child:
                log.error("the engine process has been silent for %.0f s and is killed", silent)
                self._child.kill()

    def _send(self, message: list[Any]) -> None:
        # While the engine is down nothing is lost: it gets all live requests when it is back.
        if self.ready and self._writer is not None:
            self._writer.write(pack(message))


async def receive(reader: asyncio.StreamReader) -> list[Any]:
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return unpack(await reader.readexactly(size))


def environment(config: EngineConfig) -> dict[str, str]:
    """What must be set before torch is loaded; what the user set stays."""
    threads = config.threads or len(os.sched_getaffinity(0))
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        # Our own kernels spin for as long as it pays; a thread that waits for the next iteration sleeps.
        "OMP_WAIT_POLICY": "passive",
        # Large buffers come back every iteration: keep their pages instead of giving them to the system.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
    }
    return {**wanted, **os.environ}
