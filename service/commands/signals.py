"""Ends a command in order on SIGTERM and Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def on_signals(action: Callable[[], None]) -> None:
    """Call `action` in the running loop for each signal from now on."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, action)


async def until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it at the first signal and wait for its clean-up; a second signal
    during that is left to the clean-up's own limits."""
    task = asyncio.ensure_future(work)
    stopped = False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            task.cancel()

    on_signals(stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped:
            raise
