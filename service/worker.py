"""The worker: wires its parts, runs them, and stops them in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from aiokafka.errors import KafkaError
from opentelemetry.sdk.trace import TracerProvider

from plait.service.admission import Admission
from plait.service.cancels import Cancels
from plait.service.claims import Claims
from plait.service.clock import Clock
from plait.service.control import Control
from plait.service.dead_letters import DeadLetters
from plait.service.engine_port import EngineLike
from plait.service.http import Admin
from plait.service.intake import Intake
from plait.service.kafka import say
from plait.service.leases import Lease
from plait.service.lookup import Lookup
from plait.service.membership import Membership
from plait.service.metrics import Metrics
from plait.service.publisher import Publisher
from plait.service.read_ahead import ReadAhead
from plait.service.settings import Settings
from plait.service.stream import Services, Stream
from plait.service.sweeper import Sweeper
from plait.service.telemetry import make_provider, make_tracer
from plait.service.topics import Topics
from plait.service.watchdog import Watchdog

log = logging.getLogger(__name__)

CONNECT_BACKOFF_S = 0.5
STILL_WAITING_S = 10.0  # between lines about a broker that does not answer
CLOSE_TIMEOUT_S = 10.0


class WorkerFailed(RuntimeError):
    """The worker cannot go on; the message says why."""


class Worker:
    """`await run()` serves until `stop()`. An engine that is not ready is started, and stopped at the end.

    `provider` makes the spans; without one, `settings.telemetry` decides.
    """

    def __init__(
        self,
        settings: Settings,
        engine: EngineLike,
        *,
        clock: Clock | None = None,
        provider: TracerProvider | None = None,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.clock = clock or Clock()
        self.metrics = Metrics()
        self.ready = asyncio.Event()
        self._provider = provider
        self._own_provider: TracerProvider | None = None
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._failure: BaseException | None = None
        self._streams: set[Stream] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._engine_is_ours = False
        self.membership = Membership(self.clock, settings.kafka.session_timeout_ms / 1000)
        self.publisher = Publisher(settings, self.metrics, self.membership)
        self.topics = Topics(settings, self.metrics)
        self.sweeper = Sweeper(settings, self.topics, self.metrics, self.clock, self.publisher)
        self.lookup = Lookup(settings)
        lanes = settings.topics.all_lanes()
        read_ahead = ReadAhead(settings.worker, lanes)
        self.intakes = [
            Intake(
                settings,
                self.metrics,
                self.clock,
                self._serve,
                self.membership,
                lane=lane,
                read_ahead=read_ahead,
            )
            for lane in lanes
        ]
        self.claims = Claims(settings.claims)
        self.control = Control(settings, self.metrics, self._cancel)
        self.cancels = Cancels(
            settings.worker.remember_cancels, settings.worker.remember_cancels_s, self.clock
        )
        checks = {"/livez": self._live, "/readyz": self._is_ready, "/startupz": self._started}
        self.watchdog = Watchdog(settings.http.stalled_after_s, self._live)
        self.http = Admin(settings.http, self.metrics.registry, checks)
        self._services: Services | None = None
        self._has_started = False

    async def run(self) -> None:
        """Serve until `stop`. Raises WorkerFailed when it could not start, or could not go on."""
        try:
            if await self._unless_stopped(self._start()):
                await self._stopping.wait()
                await self._drain()
        finally:
            await self._close()
        if self._failure is not None:
            raise WorkerFailed(say(self._failure)) from self._failure

    def stop(self) -> None:
        """Begin to drain; a second call ends without waiting for what is in flight."""
        if self._stopping.is_set():
            self._forced.set()
        self._stopping.set()

    @property
    def intake(self) -> Intake:
        """That of the first lane, which is the only one unless others are configured."""
        return self.intakes[0]

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    async def _start(self) -> None:
        settings = self.settings
        if settings.http.enabled:
            await self.http.start()
            log.info("health and metrics at http://%s:%d", settings.http.host, self.http.port)
        self.watchdog.start()
        self._own_provider = None if self._provider else make_provider(settings.telemetry)
        self._engine_is_ours = not self.engine.ready
        try:
            # A group, so that the one that fails first ends the other.
            async with asyncio.TaskGroup() as group:
                group.create_task(self._connect())
                if self._engine_is_ours:
                    group.create_task(self.engine.start())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self.metrics.watch(self.engine)
        self._services = Services(
            settings=settings,
            engine=self.engine,
            admission=Admission(settings, self.engine, self.topics, self.claims),
            publisher=self.publisher,
            topics=self.topics,
            sweeper=self.sweeper,
            dead_letters=DeadLetters(self.publisher, settings.topics.dlq, self.metrics),
            cancels=self.cancels,
            metrics=self.metrics,
            tracer=make_tracer(self._provider or self._own_provider),
            clock=self.clock,
            lookup=self.lookup,
        )
        self.sweeper.start()
        self._watch("control", self.control.run())
        # Cancellations are heard before the first request is read.
        await self.control.ready.wait()
        for intake in self.intakes:
            self._watch(f"intake-{intake.lane.name}", intake.run())
        self.engine.failed.add_done_callback(self._engine_failed)
        for intake in self.intakes:
            await intake.assigned.wait()
        self._has_started = True
        self.ready.set()
        for lane in settings.topics.all_lanes():
            group_id = settings.topics.group_of(lane.topic, settings.kafka.group_id)
            log.info("ready: group %s reads %s", group_id, lane.topic)

    async def _connect(self) -> None:
        """Topics and producer, once the broker answers; gives up after `kafka.connect_timeout_s`."""
        until = self.clock.monotonic() + self.settings.kafka.connect_timeout_s
        said = float("-inf")
        while True:
            try:
                await self.topics.start()
                await self.publisher.start()
                return
            except (KafkaError, OSError) as error:
                await self.topics.stop()
                fatal = isinstance(error, KafkaError) and not error.retriable
                if fatal or self.clock.monotonic() >= until:
                    servers = self.settings.kafka.bootstrap_servers
                    raise WorkerFailed(f"no connection to Kafka at {servers}: {say(error)}") from error
                if self.clock.monotonic() >= said + STILL_WAITING_S:
                    said = self.clock.monotonic()
                    log.warning("waiting for Kafka, at most %.0f s more: %s", until - said, say(error))
                await asyncio.sleep(CONNECT_BACKOFF_S)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether the work was done; `stop` ends it early. Raises what it raises."""
        task, stopping = asyncio.create_task(work), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if task.cancelled():
            return False
        task.result()
        return True

    async def _drain(self) -> None:
        """Read no more; let what is in flight end, within the limit; leave the rest to the next worker."""
        self.ready.clear()
        for intake in self.intakes:
            intake.stop_reading()
        limit = self.settings.worker.drain_seconds
        log.info("stopping: %d requests in flight, at most %g s for them", len(self._streams), limit)
        idle = asyncio.create_task(self._idle())
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait([idle, forced], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        forced.cancel()
        for stream in list(self._streams):
            stream.hand_over()
        await self._idle()

    async def _idle(self) -> None:
        while self._streams:
            await asyncio.wait([task for s in self._streams if (task := s.task) is not None])

    async def _close(self) -> None:
        """Flush, commit, leave the group; then all the rest."""
        for stream in list(self._streams):
            stream.hand_over()
        await self._idle()
        await self._quietly("flushing", self.publisher.flush())
        await asyncio.gather(*(self._quietly("leaving the group", i.close()) for i in self.intakes))
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        await self._quietly("ending look-ups", self.lookup.stop())
        await self._quietly("closing the control consumer", self.control.close())
        await self._quietly("closing the connections to stores", self.claims.close())
        await self._quietly("stopping the sweeper", self.sweeper.stop())
        await self._quietly("closing the admin client", self.topics.stop())
        await self._quietly("closing the producer", self.publisher.stop())
        if self._engine_is_ours:
            await self._quietly("stopping the engine", self.engine.stop())
        if self._own_provider is not None:
            await self._quietly("exporting spans", asyncio.to_thread(self._own_provider.shutdown))
        await self._quietly("stopping the watchdog", self.watchdog.stop())
        await self._quietly("closing the admin endpoint", self.http.stop())
        log.info("stopped")

    async def _quietly(self, doing: str, step: Coroutine[Any, Any, object]) -> None:
        """One step of the shutdown: its failure is logged and the next one follows."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await step
        except Exception as error:
            log.warning("%s: %s", doing, say(error))

    def _watch(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"plait-{name}")
        self._tasks[name] = task
        task.add_done_callback(self._part_ended)

    def _part_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
            self._fail(error)

    def _engine_failed(self, failed: asyncio.Future[None]) -> None:
        if not failed.cancelled() and (error := failed.exception()) is not None:
            log.error("the engine failed: %s", say(error))
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stopping.set()

    def _serve(self, record: Any, lease: Lease) -> None:
        assert self._services is not None
        stream = Stream(self._services, record, lease)
        self._streams.add(stream)
        stream.start().add_done_callback(lambda _: self._streams.discard(stream))

    def _cancel(self, request_id: str) -> None:
        self.cancels.remember(request_id)
        if self._services is not None and (stream := self._services.streams.get(request_id)):
            stream.cancel()

    def _live(self) -> str | None:
        limit = self.settings.http.stalled_after_s
        if self._failure is not None:
            return say(self._failure)
        for intake in self.intakes if self._has_started else ():
            if intake.stalled(limit):
                return f"requests of {intake.lane.topic} have not been polled for {limit:g} s"
        if self._has_started and self.clock.monotonic() - self.engine.heartbeat > limit:
            return f"the engine has shown no sign of life for {limit:g} s"
        return None

    def _is_ready(self) -> str | None:
        if self._stopping.is_set():
            return "stopping"
        if not self.engine.ready:
            return "the engine is not ready"
        if not all(intake.assigned.is_set() for intake in self.intakes):
            return "no assignment from the consumer group yet"
        return None

    def _started(self) -> str | None:
        return None if self._has_started else "starting"
