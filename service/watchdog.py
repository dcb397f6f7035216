"""Says where a worker stands still: stacks of all threads when the event loop is stuck, of all tasks when a part is."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import io
import logging
import sys
from collections.abc import Callable
from typing import IO, Any

log = logging.getLogger(__name__)

MAX_STACK = 8  # frames of one task


class Watchdog:
    """While it runs, an event loop that has not turned for `seconds` has its threads' stacks written to `file` by a
    thread of C, once for each time. Such a loop cannot answer /livez either, so the probe times out.

    `check` is what /livez asks; when it begins to complain, the stacks of all tasks go to the log.
    """

    def __init__(self, seconds: float, check: Callable[[], str | None], file: IO[Any] | None = None) -> None:
        self._seconds = seconds
        self._check = check
        self._file = file or sys.stderr
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="plait-watchdog")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        complained = False
        try:
            while True:
                self._arm()
                problem = self._check()
                if problem is not None and not complained:
                    log.error("not alive: %s; the tasks:\n%s", problem, stacks())
                complained = problem is not None
                await asyncio.sleep(self._seconds / 4)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _arm(self) -> None:
        with contextlib.suppress(io.UnsupportedOperation, ValueError):  # no file behind it, as in a notebook
            faulthandler.dump_traceback_later(self._seconds, file=self._file)


def stacks() -> str:
    """What every task of this event loop waits for."""
    text = io.StringIO()
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
        task.print_stack(limit=MAX_STACK, file=text)
    return text.getvalue()
