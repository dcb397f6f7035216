"""A broker and a worker in one place, for commands that are given none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.engine.process import EngineProcess
    from plait.service.engine_port import EngineLike
    from plait.service.settings import Settings
    from plait.service.worker import Worker

Say = Callable[[str], None]
Sections = Mapping[str, Mapping[str, Any]]
NOTHING: Sections = {}


class StackFailed(RuntimeError):
    """The worker of this stack has ended while it was needed."""


@dataclass(slots=True)
class Stack:
    """What a command works with. `engine` is None when the workers are somebody else's."""

    bootstrap_servers: str
    engine: EngineLike | None = None
    _worker: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """A block that ends with StackFailed as soon as this stack's worker does."""
        if self._worker is None:
            yield
            return
        task = asyncio.current_task()
        assert task is not None
        failures: list[BaseException] = []

        def give_up(ended: asyncio.Task[None]) -> None:
            error = None if ended.cancelled() else ended.exception()
            failures.append(error or RuntimeError("it ended"))
            task.cancel()

        self._worker.add_done_callback(give_up)
        try:
            yield
        except asyncio.CancelledError:
            if not failures:
                raise
            task.uncancel()
            raise StackFailed(f"the worker failed: {failures[0]}") from failures[0]
        finally:
            self._worker.remove_done_callback(give_up)


@asynccontextmanager
async def local_stack(
    bootstrap_servers: str | None = None,
    sections: Sections = NOTHING,
    *,
    worker: bool = True,
    port: int = 0,
    say: Say = lambda _: None,
    on_broker: Say = lambda _: None,
) -> AsyncIterator[Stack]:
    """An embedded broker, unless one is given, and a worker with its engine, unless not wanted.

    `sections` are those of the settings, e.g. `{"engine": {"model": "smollm2"}}`. `say` gets a line about
    each step that takes time, `on_broker` the address once clients can connect. Raises StackFailed,
    EmbeddedBrokerFailed, and what the engine and the worker raise when they cannot start.
    """
    async with AsyncExitStack() as cleanup:
        if bootstrap_servers is None:
            from plait.service.embedded import EmbeddedBroker

            broker = await cleanup.enter_async_context(EmbeddedBroker(port=port))
            bootstrap_servers = broker.bootstrap_servers
        on_broker(bootstrap_servers)
        stack = Stack(bootstrap_servers)
        if worker:
            from plait.service.settings import Settings

            given = {"http": {"enabled": False}} | {name: dict(keys) for name, keys in sections.items()}
            given["kafka"] = {**given.get("kafka", {}), "bootstrap_servers": bootstrap_servers}
            settings = Settings.load(None, **given)
            await cleanup.enter_async_context(_worker(stack, settings, say))
        yield stack


@asynccontextmanager
async def brokers_or_local(
    bootstrap_servers: str | None, sections: Sections = NOTHING, say: Say = lambda _: None
) -> AsyncIterator[Stack]:
    """The given brokers with whatever workers they have, or a local stack of both."""
    if bootstrap_servers is not None:
        yield Stack(bootstrap_servers)
        return
    async with local_stack(None, sections, say=say) as stack:
        yield stack


def make_engine(settings: Settings) -> EngineProcess:
    """The engine, not yet started. Raises StackFailed without the engine extra."""
    try:
        from plait.engine.process import EngineProcess
    except ImportError as error:
        raise StackFailed(
            f"a worker needs the engine ({error}): pip install 'plait[engine]', or name brokers that have "
            "workers with --bootstrap-servers"
        ) from error
    return EngineProcess(settings.engine.to_config(settings.worker.max_attempts))


@asynccontextmanager
async def _worker(stack: Stack, settings: Settings, say: Say) -> AsyncIterator[None]:
    engine = make_engine(settings)
    from plait.service.worker import Worker

    worker = Worker(settings, engine)
    say(f"loading the model {settings.engine.model} (the first time it is fetched and converted)")
    run = asyncio.create_task(worker.run(), name="plait worker")
    try:
        await _ready(worker, run)
        stack.engine = engine
        stack._worker = run
        yield
    except BaseException:
        # Nobody waits for what is in flight.
        worker.stop()
        raise
    finally:
        worker.stop()
        await asyncio.gather(run, return_exceptions=True)


async def _ready(worker: Worker, run: asyncio.Task[None]) -> None:
    ready = asyncio.create_task(worker.ready.wait())
    try:
        await asyncio.wait([run, ready], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        # A worker that is still starting does not look for a call to stop.
        run.cancel()
        raise
    finally:
        ready.cancel()
    if run.done():
        await run
        raise StackFailed("the worker ended before it was ready")
