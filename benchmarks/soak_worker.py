"""The worker of `benchmarks.soak`: that of `plait worker`, and on SIGUSR1 a line of JSON about what it holds."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import sys
from collections import Counter

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from plait.service.local import make_engine
from plait.service.settings import Settings
from plait.service.worker import Worker


class OpenSpans(SpanProcessor):
    """Counts spans that have begun and not ended, and all."""

    def __init__(self) -> None:
        self.open = self.total = 0

    def on_start(self, span: object, parent_context: object = None) -> None:
        self.open += 1
        self.total += 1

    def on_end(self, span: ReadableSpan) -> None:
        self.open -= 1


async def main() -> None:
    spans, provider = OpenSpans(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(spans)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # on topics that come and go
    settings = Settings.load()
    worker = Worker(settings, make_engine(settings), provider=provider)

    def tell() -> None:
        gc.collect()
        held = {
            "tasks": len(asyncio.all_tasks()),
            "tasks_by_name": Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks()),
            "streams": len(worker._streams),
            "open_spans": spans.open,
            "spans": spans.total,
            "objects": len(gc.get_objects()),
        }
        print(json.dumps(held), flush=True)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, tell)
    loop.add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
