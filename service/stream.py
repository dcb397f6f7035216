"""One request, from its record to its one terminal event."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from dataclasses import dataclass, field
from typing import Any

from aiokafka.errors import KafkaError
from opentelemetry.trace import Tracer

from plait.engine.api import GenerationRequest, RequestRefused
from plait.schemas import ErrorCode, FinishReason, Request, headers
from plait.service import names
from plait.service.admission import Admission, Incoming, Refused, Unanswerable
from plait.service.answers import Answers, Piece, Summary, summarize, whole_answer
from plait.service.attempt import Attempt, Poisoned
from plait.service.cancels import Cancels
from plait.service.choices import Choices
from plait.service.clock import Clock
from plait.service.dead_letters import DeadLetters
from plait.service.engine_port import EngineLike
from plait.service.history import History
from plait.service.joint import Mismatch
from plait.service.kafka import say
from plait.service.leases import Lease
from plait.service.lookup import Lookup
from plait.service.metrics import Metrics
from plait.service.publisher import Outbox, Publisher, PublishFailed, take_exception
from plait.service.report import conclude, describe, measure
from plait.service.settings import Settings
from plait.service.sweeper import Sweeper
from plait.service.telemetry import RequestTrace
from plait.service.topics import Topics, TopicUnavailable

log = logging.getLogger(__name__)

RETRYABLE = (ErrorCode.INTERNAL, ErrorCode.OVERLOADED, ErrorCode.CANCELLED)
POISON = "poison"  # the engine's word for a request that took it down again and again
_numbers = itertools.count()


@dataclass
class Services:
    """What every stream of a worker uses."""

    settings: Settings
    engine: EngineLike
    admission: Admission
    publisher: Publisher
    topics: Topics
    sweeper: Sweeper
    dead_letters: DeadLetters
    cancels: Cancels
    metrics: Metrics
    tracer: Tracer
    clock: Clock
    lookup: Lookup
    trial: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the one request that is suspected
    streams: dict[str, Stream] = field(default_factory=dict)  # by request id


class Stream:
    """Serves one record: `run` ends when its terminal event, or its dead letter, is durable, or when the
    request was abandoned to another worker; its spans end in every case."""

    def __init__(self, services: Services, record: Any, lease: Lease) -> None:
        self._services = services
        self._record = record
        self._lease = lease
        self._clock = services.clock
        self._arrived = services.clock.monotonic()
        self._number = next(_numbers)
        self._choices = Choices(services.engine)
        self._end_as: str | None = None  # "cancelled" or "deadline" once asked for
        self._deadline: asyncio.TimerHandle | None = None
        self._preparing: asyncio.Task[list[GenerationRequest]] | None = None
        self._abandoned: str | None = None
        self._outcome: str | None = None  # once the answer, or the dead letter, is durable
        self._index = 0
        self._resumed_at = 0  # the index of this worker's first event
        self._least_epoch = 0
        self._history = History()
        self._attempt = Attempt(lease, self._choices, services.trial, services.settings.worker.max_attempts)
        self._incoming: Incoming | None = None
        self._answers: Answers | None = None
        self._outbox: Outbox | None = None
        self._topic_ready: asyncio.Task[bool] | None = None
        self._published_from: float | None = None
        self._error: tuple[str, str] | None = None  # code and message of an error event
        self.task: asyncio.Task[None] | None = None
        self._trace = RequestTrace(
            services.tracer,
            services.clock,
            f"{names.SPAN_PROCESS} {record.topic}",
            record.headers,
            self._arrived,
            {
                names.MESSAGING_SYSTEM: names.SYSTEM,
                names.MESSAGING_OPERATION_TYPE: "process",
                names.MESSAGING_OPERATION_NAME: names.SPAN_PROCESS,
                names.MESSAGING_DESTINATION: record.topic,
                names.MESSAGING_PARTITION: str(record.partition),
                names.MESSAGING_OFFSET: record.offset,
                names.MESSAGING_GROUP: services.settings.kafka.group_id,
                names.MESSAGING_BODY_SIZE: len(record.value or b""),
                names.MESSAGING_TOMBSTONE: record.value is None,
                names.EPOCH: lease.epoch,
            },
        )

    def start(self) -> asyncio.Task[None]:
        self._lease.on_lost = self.revoke
        self.task = asyncio.create_task(self.run(), name=f"plait-stream-{self._number}")
        # Not in `run`: a task that is cancelled before its first step runs nothing of it.
        self.task.add_done_callback(lambda _: self._close())
        return self.task

    def cancel(self) -> None:
        """The client wants no more: answer with what there is, as `cancelled`."""
        self._stop("cancelled")

    def revoke(self) -> None:
        """The partition went to another worker, which answers: stop without a terminal event."""
        self._abandon(names.OUTCOME_REVOKED)

    def hand_over(self) -> None:
        """The worker stops: leave the request to the next one, without a terminal event."""
        self._abandon(names.OUTCOME_HANDED_OVER)

    async def run(self) -> None:
        try:
            self._outcome = await self._answer_or_bury()
        except asyncio.CancelledError:
            if self._abandoned is None:
                raise

    async def _answer_or_bury(self) -> str:
        try:
            return await self._answer()
        except Unanswerable as reason:
            self._error = ("dead_letter", str(reason))
            self._trace.set({names.DEAD_LETTER_REASON: str(reason)})
            await self._services.dead_letters.put(self._record, reason.kind, str(reason))
            return names.OUTCOME_DEAD_LETTER

    async def _answer(self) -> str:
        """Publish the whole answer and return the outcome. Raises Unanswerable."""
        try:
            return await self._serve()
        except Unanswerable:
            raise
        except TopicUnavailable as error:
            raise Unanswerable("no_response_topic", str(error)) from error
        except PublishFailed as error:
            return await self._apologize("this answer could not be published", error)
        except Exception as error:
            log.exception("request at %s[%d]@%d", *self._position())
            return await self._apologize("the worker failed on this request", error)

    async def _serve(self) -> str:
        services = self._services
        self._incoming = incoming = services.admission.read(self._record)
        other = services.streams.setdefault(incoming.request_id, self)
        if other is not self:
            raise Unanswerable("duplicate", f"duplicate request_id in flight: {incoming.request_id}")
        describe(self._trace, incoming, services.engine.model.name)
        self._answers = Answers(
            incoming.request_id, incoming.content_type, services.settings.worker.max_event_bytes
        )
        topic = incoming.topic
        services.publisher.retain(topic)
        self._outbox = Outbox(
            self._lease.partition.channel or services.publisher,
            services.metrics,
            topic,
            incoming.request_id.encode(),
            self._ensure_topic,
        )
        # While the prompt is tokenized and prefilled; nobody else waits for it.
        self._topic_ready = asyncio.create_task(self._open_topic(topic))
        self._topic_ready.add_done_callback(take_exception)
        try:
            if self._lease.maybe_started and await self._was_answered(topic):
                return names.OUTCOME_ACKNOWLEDGED
            self._check_refused(incoming)
            if incoming.refusal is not None or incoming.request is None:
                raise incoming.refusal or Refused(ErrorCode.INVALID_REQUEST, "unreadable")
            await self._attempt.begin(self._history)
            return await self._generate(incoming.request)
        except Refused as refused:
            return await self._refuse(refused)
        except Poisoned as poisoned:
            await services.dead_letters.put(self._record, "poison", str(poisoned))
            return await self._refuse(Refused(ErrorCode.INTERNAL, str(poisoned)))

    def _check_refused(self, incoming: Incoming) -> None:
        """With transactions an event that its topic refuses takes the others with it, and all come again: then say
        so, and if that is refused too, give up. Raises Refused, Unanswerable."""
        times, reason = self._lease.partition.refused.get(incoming.request_id.encode(), (0, ""))
        message = f"{incoming.topic} refused an event: {reason}"
        if times > 1:
            raise Unanswerable("unpublishable", message)
        if times:
            raise Refused(ErrorCode.INTERNAL, message, retryable=True)

    async def _was_answered(self, topic: str) -> bool:
        """Look up what an earlier worker published; whether that is all."""
        assert self._incoming is not None and self._topic_ready is not None
        if await asyncio.shield(self._topic_ready):
            return False  # the topic was made just now
        own = self._services.topics.is_per_request(topic)
        since = None if own else max(0, self._record.timestamp)
        self._history = history = await self._services.lookup.find(topic, self._incoming.request_id, since)
        if history.torn:
            log.warning("%s: events behind a gap at %d", self._incoming.request_id, len(history.events))
        self._index = self._resumed_at = len(history.events)
        self._least_epoch = history.epoch + 1
        return history.finished

    async def _generate(self, request: Request) -> str:
        """Run the request on the engine and publish what comes. Raises Refused."""
        waited_ms = self._waited_ms(request)
        if request.slo.deadline_ms is not None and request.slo.on_miss == "reject":
            left = (request.slo.deadline_ms - waited_ms) / 1000
            if left <= 0:
                raise self._late(request)
            self._deadline = asyncio.get_running_loop().call_later(left, self._stop, "deadline")
        self._choices.resume(self._history.choices(request.sampling.n))
        self._trace.set({names.RESUMED_TOKENS: self._choices.resumed or None})
        # What was begun in pieces goes on so, also when the whole was asked for at the end.
        streams = request.stream or self._resumed_at > 0
        if self._services.cancels.seen(request.request_id):
            self._end_as = "cancelled"
        if self._end_as is None:
            sequences = await self._prepare(request, self._arrived - waited_ms / 1000)
            if self._end_as is None:
                self._submit(sequences)
        held: list[Piece] = []
        while pieces := await self._choices.next():
            self._attempt.passed()
            if streams:
                for piece in pieces:
                    await self._publish_tokens(piece)
            else:
                held += pieces
        if (failed := self._choices.error) is not None:
            if failed.code == POISON:
                raise Poisoned(failed.message or "the engine died of this request")
            code = _code(failed.code)
            raise _refused(code, failed.message or "the engine failed", failed.retry_after)
        if self._choices.cut and self._end_as == "deadline":
            raise self._late(request)
        if self._choices.cut and self._end_as is None:
            raise Refused(ErrorCode.CANCELLED, "the engine gave the request up", retryable=True)
        return await self._finish(request, None if streams else held, waited_ms)

    async def _prepare(self, request: Request, created: float) -> list[GenerationRequest]:
        """What the engine is to run; nothing when the request was ended meanwhile. Raises Refused."""
        work = self._services.admission.sequences(request, str(self._number), self._arrived, created)
        if request.prompt_ref is None:
            return await work
        self._preparing = asyncio.create_task(work)
        await asyncio.wait([self._preparing])
        return [] if self._preparing.cancelled() else self._preparing.result()

    def _submit(self, sequences: list[GenerationRequest]) -> None:
        try:
            self._choices.submit(sequences)
        except Mismatch as error:
            raise Refused(ErrorCode.INTERNAL, str(error), retryable=True) from error
        except RequestRefused as error:
            raise _refused(_code(error.code), str(error), error.retry_after) from error

    def _stop(self, end_as: str) -> None:
        if self._end_as is None:
            self._end_as = end_as
            if self._preparing is not None:
                self._preparing.cancel()
            self._choices.stop()

    def _abandon(self, outcome: str) -> None:
        if self._abandoned is None and self.task is not None and not self.task.done():
            self._abandoned = outcome
            self._unregister()
            self._choices.close()
            self.task.cancel()

    async def _publish_tokens(self, piece: Piece) -> None:
        assert self._answers is not None
        for value in self._answers.tokens(piece, self._index, self._epoch):
            await self._put(value, "tokens")

    async def _put(self, value: bytes, kind: str) -> None:
        assert self._outbox is not None and self._topic_ready is not None
        if self._topic_ready.done():
            self._topic_ready.result()
        else:
            await asyncio.shield(self._topic_ready)
        if self._published_from is None:
            self._published_from = self._clock.monotonic()
        await self._outbox.put(value, self._headers(kind))
        self._index += 1
        self._services.metrics.event[kind].inc()

    async def _finish(self, request: Request, held: list[Piece] | None, waited_ms: float) -> str:
        assert self._answers is not None
        summary = self._summary(request, waited_ms)
        fields: dict[str, Any] = {
            "finish_reason": summary.reasons[0],
            "finish_reasons": summary.reasons,
            "usage": summary.usage,
            "timing": summary.timing,
            "slo": summary.slo,
            "metadata": request.metadata,
        }
        whole = {} if held is None else whole_answer(held, request.sampling.n)
        value = self._answers.done(fields | whole, self._index, self._epoch)
        if whole and not self._answers.fits(value):
            for piece in held or ():
                await self._publish_tokens(piece)
            value = self._answers.done(fields, self._index, self._epoch)
        await self._put(value, "done")
        await self._flush()
        measure(self._services.metrics, summary, self._choices.finishes.values())
        cancelled = FinishReason.CANCELLED in summary.reasons
        return names.OUTCOME_CANCELLED if cancelled else names.OUTCOME_DONE

    async def _refuse(self, refused: Refused) -> str:
        assert self._answers is not None and self._incoming is not None
        request = self._incoming.request
        self._error = (refused.code.value, str(refused))
        value = self._answers.error(
            refused.code,
            str(refused),
            self._index,
            self._epoch,
            retryable=refused.retryable,
            retry_after_ms=refused.retry_after_ms,
            metadata=request.metadata if request else None,
        )
        await self._put(value, "error")
        await self._flush()
        return names.OUTCOME_ERROR

    async def _apologize(self, message: str, error: Exception) -> str:
        """After a failure of our own, or an event that the broker refused: end the response all the same."""
        self._choices.cancel()
        if self._answers is None or self._outbox is None:
            raise Unanswerable("worker_failed", f"{message}: {error}") from error
        # What the producer still holds would come to the topic under the numbers of the apology.
        await self._outbox.give_up()
        self._index = self._resumed_at + self._outbox.delivered
        try:
            return await self._refuse(Refused(ErrorCode.INTERNAL, f"{message}: {error}", retryable=True))
        except Exception as second:
            raise Unanswerable("unpublishable", f"{message}: {second}") from second

    async def _flush(self) -> None:
        assert self._outbox is not None
        await self._outbox.flush()
        if self._published_from is not None:
            self._trace.publish_stage(
                self._outbox.topic,
                self._published_from,
                self._clock.monotonic(),
                self._index - self._resumed_at,
            )

    @property
    def _epoch(self) -> int:
        """The group's generation; above what is published, also when the group has forgotten how far it was."""
        return max(self._lease.epoch, self._least_epoch)

    async def _open_topic(self, topic: str) -> bool:
        made = await self._services.topics.prepare(topic)
        try:
            await self._services.publisher.warm(topic)
        except KafkaError as error:
            log.warning("metadata of %s: %s", topic, say(error))
        return made

    async def _ensure_topic(self) -> None:
        assert self._incoming is not None
        self._services.topics.forget(self._incoming.topic)
        await self._services.topics.prepare(self._incoming.topic)

    def _headers(self, kind: str) -> list[tuple[str, bytes | None]]:
        assert self._incoming is not None
        return [
            *self._trace.headers,
            (headers.CONTENT_TYPE, self._incoming.content_type.encode()),
            (headers.PLAIT_TYPE, kind.encode()),
            *self._incoming.echoed,
        ]

    def _waited_ms(self, request: Request) -> float:
        """How long ago the request was created; none when its clock is ahead of ours."""
        created = request.created_at
        if created is None:
            created = self._record.timestamp if self._record.timestamp > 0 else self._clock.wall_ms()
        since_arrival = (self._clock.monotonic() - self._arrived) * 1000
        return max(0.0, self._clock.wall_ms() - since_arrival - created)

    def _late(self, request: Request) -> Refused:
        return Refused(ErrorCode.DEADLINE_EXCEEDED, f"slo.deadline_ms: {request.slo.deadline_ms} ms are over")

    def _summary(self, request: Request, waited_ms: float) -> Summary:
        now = self._clock.monotonic()
        finishes = self._choices.outcomes(request.sampling.n, self._arrived, now)
        return summarize(request, finishes, self._arrived, waited_ms, now)

    def _close(self) -> None:
        """Give everything back; nothing here can fail for reasons of the request."""
        services = self._services
        if self._deadline is not None:
            self._deadline.cancel()
        self._choices.close()
        self._attempt.passed()
        if self._preparing is not None:
            self._preparing.cancel()
        self._unregister()
        if self._topic_ready is not None:
            self._topic_ready.cancel()
        if self._outbox is not None:
            self._outbox.discard()
            topic = self._outbox.topic
            services.publisher.release(topic, forget=services.topics.is_per_request(topic))
            services.sweeper.schedule(topic)
        if self._outcome is not None:
            self._lease.finish()
        else:
            self._lease.abandon()
        outcome = self._outcome or self._abandoned or names.OUTCOME_HANDED_OVER
        conclude(
            self._trace, services.metrics, self._choices.finishes, outcome, self._error, self._choices.resumed
        )

    def _unregister(self) -> None:
        streams = self._services.streams
        if self._incoming is not None and streams.get(self._incoming.request_id) is self:
            del streams[self._incoming.request_id]

    def _position(self) -> tuple[str, int, int]:
        return self._record.topic, self._record.partition, self._record.offset


def _refused(code: ErrorCode, message: str, retry_after: float | None) -> Refused:
    if retry_after == math.inf:
        return Refused(code, message)
    retry_after_ms = None if retry_after is None else max(1, round(retry_after * 1000))
    return Refused(code, message, retryable=code in RETRYABLE, retry_after_ms=retry_after_ms)


def _code(code: str | None) -> ErrorCode:
    try:
        return ErrorCode(code or ErrorCode.INTERNAL)
    except ValueError:
        return ErrorCode.INTERNAL
