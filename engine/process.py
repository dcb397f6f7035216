"""The engine in a process of its own, seen from the process that talks to Kafka.

The parent keeps what each request has so far. When the engine dies it is started again and gets every request
back with the tokens already generated; since noise depends on (seed, position) alone, each goes on as if
nothing had happened, and the reader of its outputs sees neither a gap nor a repetition.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from plait.engine.api import (
    QUEUE_RETRY_SECONDS,
    EngineStats,
    GenerationRequest,
    ModelInfo,
    OnOutput,
    RequestRefused,
    Timeline,
    Told,
    check,
)
from plait.engine.config import EngineConfig
from plait.engine.link import HEADER, pack, request_out, unpack
from plait.engine.live import Live
from plait.engine.models import resolve
from plait.engine.text import TextStream
from plait.engine.tokenizer import Tokenizer
from plait.engine.trials import Trials

log = logging.getLogger(__name__)
START_ATTEMPTS = 3
STOP_SECONDS = 5.0


class EngineFailed(RuntimeError):
    """The engine cannot be started, or not be brought back; the message says why."""


class EngineProcess:
    """Start it, submit requests, get outputs by callback in the event loop. `failed` ends when all is lost."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.stats = EngineStats()
        self.heartbeat = time.monotonic()
        self.ready = False
        self.restarts = 0
        self.startup: dict[str, float] = {}
        """Seconds that the engine's process took to come up, by what they were spent on."""
        self.live: dict[str, Live] = {}
        self._trials = Trials(config.max_restarts)
        self._stopping = False
        self._child: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load the model and come up. Raises EngineFailed, ModelUnavailable."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self.launch()
        try:
            # While that process imports what it needs, which takes longer.
            self._path = await asyncio.to_thread(resolve, self.config.model)
            try:
                self.tokenizer = await asyncio.to_thread(Tokenizer, self._path)
            except Exception as error:
                raise EngineFailed(
                    f"the tokenizer of {self.config.model} cannot be loaded: {error}"
                ) from error
            reader = await self._come_up()
        except BaseException:
            await self._reap(0.0)
            raise
        self._tasks = [asyncio.create_task(self._supervise(reader)), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        """End the process. Requests that are still live get no further output."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._send(["stop"])
        await self._reap(STOP_SECONDS if self.ready else 0.0)
        self.ready = False

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Queue a request; `on_output` gets its outputs, the last one with a finish. Raises RequestRefused."""
        if self.failed.done() or self._stopping:
            raise RequestRefused("internal", "engine", "is not running any more")
        if request.request_id in self.live:
            raise RequestRefused("invalid_request", "request_id", f"{request.request_id!r} is in flight")
        check(request, self.model)
        if len(self.live) >= self.config.max_running + self.config.max_waiting:
            raise RequestRefused(
                "overloaded",
                "max_waiting",
                f"{len(self.live)} requests are in flight already",
                QUEUE_RETRY_SECONDS,
            )
        if not request.arrival:
            request.arrival = time.monotonic()
        text = TextStream(self.tokenizer, request.sampling, request.prompt_token_ids)
        for token in request.output_token_ids:
            text.push(token)
        live = Live(request, on_output, text, Timeline(request.arrival), list(request.output_token_ids))
        self.live[live.id] = live
        # While the engine is down nothing is lost: it gets all live requests when it is back.
        if self.ready and self._trials.admits(live):
            self._give(live)

    def cancel(self, request_id: str) -> None:
        """End a request early; it then finishes as cancelled. Unknown ids are ignored."""
        live = self.live.get(request_id)
        if live is None:
            return
        live.cancelled = True
        if self.ready and live.sent:
            self._send(["cancel", request_id, False])
        else:
            self._end(live, "cancelled")
            self._give_next()

    def told(self, request: GenerationRequest) -> Told:
        """What the outputs said of a request's `output_token_ids` when they were generated."""
        text = TextStream(self.tokenizer, request.sampling, request.prompt_token_ids)
        said = "".join([text.push(token) for token in request.output_token_ids])
        return Told(said, text.held, text.stopped)

    def begun(self, request_id: str) -> bool:
        """Whether the engine that runs now has begun to compute this request."""
        live = self.live.get(request_id)
        return live is not None and live.running

    async def launch(self) -> None:
        """Start the process, which imports what it needs and waits for its configuration; once before `start`, which
        else does it. Raises EngineFailed."""
        if self._child is not None and self._child.returncode is None:
            return
        ours, theirs = socket.socketpair()
        self._child = self._writer = None
        self._launched = time.monotonic()
        try:
            with theirs:
                self._child = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "plait.engine.child", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env=environment(self.config),
                    # Ctrl-C is for the parent, which then drains: the engine must outlive it.
                    start_new_session=True,
                )
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
        except OSError as error:
            ours.close()
            await self._reap(0.0)
            raise EngineFailed(f"the engine process cannot be started: {error}") from error
        except BaseException:
            if self._writer is None:
                ours.close()
            await self._reap(0.0)
            raise

    async def _come_up(self) -> asyncio.StreamReader:
        """Configure the process that was launched and wait until it has loaded the model. Raises EngineFailed."""
        assert self._writer is not None
        vocab_size = self.config.vocab_size or self.tokenizer.vocab_size
        config = asdict(replace(self.config, model=str(self._path), vocab_size=vocab_size))
        try:
            self._writer.write(pack(["start", config]))
            kind, *payload = await receive(self._reader)
        except (asyncio.IncompleteReadError, OSError):
            code = await self._reap(STOP_SECONDS)
            raise EngineFailed(
                f"the engine process ended with code {code} while it loaded the model"
            ) from None
        except BaseException:
            await self._reap(0.0)
            raise
        if kind == "failed":
            await self._reap(STOP_SECONDS)
            raise EngineFailed(payload[0])
        model, (imported, configured, loaded, warm) = payload
        self.model = replace(ModelInfo(**model), name=self.config.model)
        self.startup = {
            "imports": imported - self._launched,
            "configuration": configured - imported,
            "weights": loaded - configured,
            "warm-up": warm - loaded,
        }
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.startup.items())
        log.info("the engine is ready after %.1f s: %s", warm - self._launched, spent)
        self.heartbeat = time.monotonic()
        self.ready = True
        return self._reader

    async def _reap(self, patience: float) -> int | None:
        """Close the link, which ends the process, and make sure that it has ended. Gives its exit code."""
        if self._writer:
            self._writer.close()
        if self._child is None:
            return None
        try:
            return await asyncio.wait_for(self._child.wait(), patience)
        except TimeoutError:
            if self._child.returncode is None:
                self._child.kill()
            return await self._child.wait()

    async def _supervise(self, reader: asyncio.StreamReader) -> None:
        while True:
            await self._listen(reader)
            self.ready = False
            code = await self._reap(STOP_SECONDS)
            log.error("the engine process ended with code %s; starting it again", code)
            self._crashed()
            try:
                reader = await self._respawn()
            except Exception as error:
                log.error("the engine cannot be brought back: %s", error)
                self._fail(error)
                return

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Until the process ends, or says what nobody understands."""
        try:
            while True:
                self._receive(await receive(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception:
            log.exception("the engine process cannot be understood")

    async def _respawn(self) -> asyncio.StreamReader:
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                await self.launch()
                reader = await self._come_up()
                break
            except EngineFailed as error:
                log.error("start %d of %d failed: %s", attempt, START_ATTEMPTS, error)
                if attempt == START_ATTEMPTS:
                    raise
                await asyncio.sleep(attempt)
        self.restarts += 1
        now = time.monotonic()
        for live in self.live.values():
            live.timeline.restarts.append(now)
        for live in self._trials.restart(self.live.values()):
            self._give(live)
        return reader

    def _crashed(self) -> None:
        """End what needs no engine any more, and what has been running in too many crashes."""
        blamed = self._trials.blame(self.live.values())
        for live in list(self.live.values()):
            if live.text.stopped:
                self._end(live, "stop")
            elif live.cancelled:
                self._end(live, "cancelled")
        for live in blamed:
            message = f"the engine process died {live.crashes} times while it ran this request"
            self._end(live, "error", "poison", message)

    def _fail(self, error: Exception) -> None:
        for live in list(self.live.values()):
            self._end(live, "error", "internal", f"the engine cannot be brought back: {error}")
        self.failed.set_exception(error)
        # Whoever watches `failed` is told; asyncio need not warn as well.
        self.failed.exception()

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
                self._advance(live, tokens, logprob, finish)
        self._give_next()

    def _advance(
        self, live: Live, tokens: list[int], logprob: list[Any] | None, finish: list[Any] | None
    ) -> None:
        stopped = live.text.stopped
        if finish:
            del self.live[live.id]
        try:
            live.advance(tokens, logprob, finish)
        except Exception as error:
            log.exception("the output of request %s cannot be turned into text", live.id)
            self._send(["cancel", live.id, False])
            self._end(live, "error", "internal", f"the output cannot be turned into text: {error}")
            return
        self._trials.passed(live)
        if live.text.stopped and not stopped and not live.over:
            self._send(["cancel", live.id, True])

    def _end(self, live: Live, reason: Any, code: str | None = None, message: str | None = None) -> None:
        self.live.pop(live.id, None)
        live.end(reason, code, message)

    def _give(self, live: Live) -> None:
        """Hand a request to the engine."""
        live.sent = True
        self._send(["add", request_out(live.resumed())])
        if live.text.stopped:
            self._send(["cancel", live.id, True])

    def _give_next(self) -> None:
        if self.ready:
            for live in self._trials.next():
                self._give(live)

    async def _watch(self) -> None:
        """Kill an engine that has gone silent: what follows is what follows any crash."""
        seen, silent = self.heartbeat, 0
        while True:
            await asyncio.sleep(1.0)
            # Counted, not subtracted: when this process itself could not run, the engine's word may be unread.
            silent = silent + 1 if self.ready and self.heartbeat == seen else 0
            seen = self.heartbeat
            if silent > self.config.stall_seconds and self._child and self._child.returncode is None:
                log.error("the engine process has been silent for %d s and is killed", silent)
                self._child.kill()
                silent = 0

    def _send(self, message: list[Any]) -> None:
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
