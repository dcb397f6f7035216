"""The engine's own process: `python -m plait.engine.child FD`, started by `plait.engine.process`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import socket
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from plait.engine.api import RequestRefused
from plait.engine.config import EngineConfig
from plait.engine.link import Link, request_in
from plait.engine.sequence import Sequence, Status

if TYPE_CHECKING:
    from plait.engine.engine import Engine, Progress

log = logging.getLogger(__name__)
STATS_SECONDS = 0.25
COLLECT_IDLE_SECONDS, COLLECT_SECONDS = 60.0, 3600.0
"""From one garbage collection to the next, when idle and when not: it looks at all that waits, which takes 0.1 s for
10,000 requests, and no request leaves anything for it."""


def main() -> int:
    # Half a million objects are made by the imports, none of them garbage, and looking for some took a second of four.
    gc.disable()
    from plait.engine.engine import Engine

    stamps = [time.monotonic()]
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    try:
        config = configuration(link)
        stamps.append(time.monotonic())
    except (EOFError, ConnectionResetError):
        return 1
    try:
        engine = Engine(config)
        stamps.append(time.monotonic())
        engine.warm_up()
        stamps.append(time.monotonic())
    except Exception as error:
        log.debug("the engine cannot start", exc_info=True)
        link.send(["failed", f"{type(error).__name__}: {error}"])
        return 1
    link.send(["ready", asdict(engine.model), stamps])
    # What was imported and loaded stays: no collection need look at it again.
    gc.collect()
    gc.freeze()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)  # what loading took and freed goes back to the system
    engine.on_admit = lambda seqs: link.send(["running", [s.id for s in seqs]])
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(engine, link)
    engine.save_record()
    return 0


def configuration(link: Link) -> EngineConfig:
    """The parent's first message; it is sent while this process imports torch, or later."""
    while not (messages := link.receive(60.0)):
        pass
    return EngineConfig(**messages[0][1])


def serve(engine: Engine, link: Link) -> None:
    """Iterate while there is work, wait for messages while there is none; until told to stop."""
    told, idle, collected = 0.0, False, time.monotonic()
    while True:
        rows: list[list[Any]] = []
        pause = engine.scheduler.pause() if engine.has_work() else 2 * STATS_SECONDS
        waits = pause > 0
        messages = link.receive(min(pause, 2 * STATS_SECONDS))
        engine.watch.lap("idle" if waits else "ipc")
        for message in messages:
            if message[0] == "stop":
                return
            rows += handle(engine, message)
        engine.watch.lap("ipc")
        rows += [row(p) for p in engine.step()]
        now, was, idle = time.monotonic(), idle, not engine.has_work()
        if rows or now - told > STATS_SECONDS or idle != was:
            link.send(["out", rows, asdict(engine.stats())])
            told = now
        if idle and not was:
            engine.scheduler.kv.check_idle()
            engine.save_record()
        if now - collected > (COLLECT_IDLE_SECONDS if idle and was else COLLECT_SECONDS):
            gc.collect()
            collected = now
        engine.watch.lap("ipc")


def handle(engine: Engine, message: list[Any]) -> list[list[Any]]:
    if message[0] == "add":
        request = request_in(message[1])
        try:
            over = engine.add(request)
        except RequestRefused as error:
            seq = Sequence.of(request, time.monotonic())
            seq.reason, seq.message = "error", str(error)
            seq.code, seq.retry_after = error.code, error.retry_after
            return [[seq.id, [], None, finish(seq)]]
        return [row(over)] if over else []
    cancelled = engine.cancel(message[1], stopped=message[2])
    return [] if cancelled is None else [[cancelled.id, [], None, finish(cancelled)]]


def row(progress: Progress) -> list[Any]:
    seq, p = progress.seq, progress.logprob
    return [
        seq.id,
        [] if progress.token is None else [progress.token],
        None if p is None else [p.token_id, p.logprob, p.top],
        finish(seq) if seq.status is Status.FINISHED else None,
    ]


def finish(seq: Sequence) -> list[Any]:
    t = seq.timeline
    error = [seq.code, seq.message, seq.retry_after]
    times = [t.scheduled, t.first_token, t.finished, t.preemptions, t.swaps]
    return [seq.reason, error, *times, seq.cached_tokens]


if __name__ == "__main__":
    sys.exit(main())
