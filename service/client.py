"""The async client: produce requests, follow their streams of tokens. Needs no torch and no engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    NoError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)
from opentelemetry import propagate, trace
from opentelemetry.util.types import AttributeValue

from plait.schemas import (
    MSGPACK,
    WIRE_VERSION,
    Cancel,
    DoneEvent,
    ErrorEvent,
    Event,
    Message,
    PromptRef,
    Sampling,
    Slo,
    Timing,
    TokensEvent,
    Usage,
    decode_request,
    encode,
    headers,
    response_topic_of,
)
from plait.schemas.codec import pack
from plait.schemas.names import CONTROL_TOPIC, REQUESTS_TOPIC
from plait.service import names
from plait.service.positions import Position
from plait.service.response_reader import Inbox, ResponseReader
from plait.service.topics import create

log = logging.getLogger(__name__)
tracer = trace.get_tracer("plait.client")

# Not the prefix of the workers, who remove its topics when they have not been used for a while.
OWN_PREFIX = "plait.clients."
_PATIENCE_S = 5.0
_ELSEWHERE_S = 5.0


class RequestFailed(RuntimeError):
    """The worker ended a request with an `error` event. `code` is an error code of the wire."""

    def __init__(self, code: str, message: str, retryable: bool, retry_after_ms: int | None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retryable = retryable
        self.retry_after_ms = retry_after_ms


class StreamBroken(RuntimeError):
    """An event of the stream is missing and did not come in time."""


class BrokersUnreachable(ConnectionError):
    """No Kafka broker answers at the address that was given."""


class RequestTooLarge(ValueError):
    """The encoded request is over the size that the brokers take."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. `text` and `token_ids` are those of choice 0, `texts` those of all choices."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    timing: Timing
    texts: list[str]


class Client:
    """Many concurrent requests over one producer and one consumer.

    Without `response_topic` the client makes a topic of its own and deletes it at the end; with
    `per_request_topics` every request is answered on `plait.responses.<request_id>`. A named
    `response_topic` must exist, and may be shared with others. `kafka` holds further arguments of aiokafka's
    clients (`security_protocol`, `sasl_mechanism`, `ssl_context`, ...).
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        requests_topic: str = REQUESTS_TOPIC,
        response_topic: str | None = None,
        per_request_topics: bool = False,
        control_topic: str = CONTROL_TOPIC,
        content_type: str = MSGPACK,
        timeout_s: float = 300.0,
        gap_timeout_s: float = 30.0,
        max_request_bytes: int = 1_000_000,
        kafka: Mapping[str, Any] | None = None,
    ) -> None:
        if response_topic is not None and per_request_topics:
            raise ValueError("response_topic and per_request_topics exclude each other")
        self._owns_topic = response_topic is None and not per_request_topics
        if self._owns_topic:
            response_topic = f"{OWN_PREFIX}{uuid.uuid4().hex}"
        self.response_topic = response_topic
        self._made_topic = False
        self._bootstrap_servers = bootstrap_servers
        self._requests_topic = requests_topic
        self._control_topic = control_topic
        self._content_type = content_type
        self._timeout_s = timeout_s
        self._gap_timeout_s = gap_timeout_s
        self._max_request_bytes = max_request_bytes
        extra = {name: value for name, value in (kafka or {}).items() if name != "bootstrap_servers"}
        self._admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers, **extra)
        # Room for the headers beside the value, and below the default limit of the brokers.
        self._producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap_servers,
            acks="all",
            enable_idempotence=True,
            max_request_size=max_request_bytes + 40_000,
            **extra,
        )
        self._reader = ResponseReader(bootstrap_servers, extra)
        self._positions: dict[str, Position] = {}
        self._readers: Counter[str] = Counter()  # streams by topic
        self._unended: dict[str, bool] = {}  # submitted here, no end seen; true when cancelled
        self._listed, self._topics = 0.0, frozenset[str]()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect. Raises BrokersUnreachable, and KafkaError when the brokers refuse."""
        try:
            await self._admin.start()
            if self._owns_topic and self.response_topic:
                await self._make_topic(self.response_topic)
                self._made_topic = True
            await self._producer.start()
            await self._reader.start()
            if self.response_topic:
                partitions = await self._partitions(self.response_topic, made=self._owns_topic)
                await self._reader.follow(partitions, from_end=not self._owns_topic)
        except KafkaConnectionError as error:
            await self.close()
            raise BrokersUnreachable(f"no Kafka broker answers at {self._bootstrap_servers}") from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop reading, send what is left, delete the topic that the client made.

        The ends of cancelled requests are waited for, shortly; while others have not ended a worker still
        writes to the topic, which then stays (`plait topics --remove-expired` removes it).
        """
        await self._hear_cancelled()
        await self._reader.stop()
        await self._producer.stop()
        try:
            if self._made_topic and self._unended:
                log.info("%s stays: %d requests have not ended", self.response_topic, len(self._unended))
            elif self._made_topic:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._admin.delete_topics([self.response_topic])
        except (KafkaError, OSError, TimeoutError) as error:
            log.warning("the response topic %s was not deleted: %r", self.response_topic, error)
        finally:
            await self._admin.close()

    async def _hear_cancelled(self) -> None:
        if not self._made_topic:
            return
        with contextlib.suppress(TimeoutError, StreamBroken, KafkaError):
            async with asyncio.timeout(_PATIENCE_S):
                for request_id in [r for r, cancelled in self._unended.items() if cancelled]:
                    with contextlib.suppress(RequestFailed):
                        async for _ in self.stream(request_id):
                            pass

    async def submit(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message | Mapping[str, str]] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        prompt_ref: PromptRef | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        model: str | None = None,
        tenant: str | None = None,
        priority: int | None = None,
        slo: Slo | Mapping[str, float] | None = None,
        stream: bool = True,
        metadata: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> str:
        """Produce one request and return its id once the brokers have it.

        From now on its events are kept until `stream` takes them. Without `priority` it is that of the lane, or 4.

        `sampling` takes the fields of `Sampling`: max_tokens, temperature, seed, stop, ... Raises TypeError
        for other names, WireError for what the wire refuses, RequestTooLarge, and KafkaError.
        """
        if unknown := sampling.keys() - Sampling.model_fields.keys():
            raise TypeError(f"unknown sampling fields: {', '.join(sorted(unknown))}")
        fields: dict[str, Any] = {
            "v": WIRE_VERSION,
            "request_id": f"req-{uuid.uuid4().hex}" if request_id is None else request_id,
            "prompt": prompt,
            "messages": None if messages is None else [_plain(m) for m in messages],
            "prompt_token_ids": None if prompt_token_ids is None else list(prompt_token_ids),
            "prompt_ref": None if prompt_ref is None else _plain(prompt_ref),
            "model": model,
            "tenant": tenant,
            "sampling": sampling,
            "priority": priority,
            "slo": None if slo is None else _plain(slo),
            "response_topic": self.response_topic,
            "stream": stream,
            "created_at": time.time_ns() // 1_000_000,
            "metadata": dict(metadata or {}),
        }
        value = pack({k: v for k, v in fields.items() if v is not None}, self._content_type)
        self._check_size(str(request_id or ""), value)
        # The worker's own reading, so that what it would refuse is refused here, with the same words.
        request, _ = decode_request(value, self._content_type)
        await self._send(request.request_id, value)
        self._unended[request.request_id] = False
        return request.request_id

    def _check_size(self, request_id: str, value: bytes) -> None:
        if len(value) > self._max_request_bytes:
            raise RequestTooLarge(
                f"request {request_id} has {len(value)} bytes; the limit is {self._max_request_bytes}"
                " (max_request_bytes)"
            )

    async def _send(self, request_id: str, value: bytes) -> None:
        self._reader.open(request_id)
        try:
            await self._produce(self._requests_topic, request_id, value, "request")
        except BaseException:
            self._reader.close(request_id)
            raise

    async def stream(
        self, request_id: str, *, timeout_s: float | None = None, resume: str | None = None
    ) -> AsyncIterator[Event]:
        """The events of a request in order, each once, up to and with `done`.

        With `resume`, a token of `position`, only those behind it: also by another client, after a restart.

        Raises RequestFailed for an `error` event, TimeoutError when no event comes within `timeout_s` seconds
        (default: the client's), StreamBroken when one is missing for longer than `gap_timeout_s`. A request
        that this client did not submit is read from the beginning of its topic. Raises ValueError for a token that
        is none, or another request's. Where the workers may not write to the client's topic (`topics.named_responses`),
        their error is found in the request's own within seconds.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        if resume is None:
            inbox = await self._find(request_id, deadline)
        else:
            position = Position.of(resume)
            if position.request_id != request_id:
                raise ValueError(f"the resume token is of request {position.request_id}, not {request_id}")
            self._positions[request_id] = position
            if position.ended:
                return
            inbox = await self._resume(position)
        topic = position.topic if resume else self.response_topic or response_topic_of(request_id)
        self._readers[topic] += 1
        try:
            while True:
                event, self._positions[request_id] = await self._next(request_id, inbox, limit)
                if isinstance(event, ErrorEvent | DoneEvent):
                    self._unended.pop(request_id, None)
                if isinstance(event, ErrorEvent):
                    raise RequestFailed(event.code, event.message, event.retryable, event.retry_after_ms)
                yield event
                if isinstance(event, DoneEvent):
                    return
        finally:
            self._reader.close(request_id)
            if (last := self._positions.get(request_id)) is not None and last.ended:
                del self._positions[request_id]
            self._readers[topic] -= 1
            if not self._readers[topic]:
                del self._readers[topic]
                if topic != self.response_topic:
                    self._reader.forget(topic)
            if inbox.elsewhere:
                self._reader.forget(response_topic_of(request_id))

    def position(self, request_id: str) -> str:
        """A token for `stream(resume=...)`: behind the event that a stream of this client gave out last.

        Raises KeyError when there was none. Keep it after the event has been dealt with.
        """
        return self._positions[request_id].token()

    async def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **request: Any
    ) -> Result:
        """Submit a request (arguments as in `submit`) and wait for its end.

        A request that is given up, by a timeout or by cancelling the task, is cancelled at the worker too.
        """
        request_id = await self.submit(prompt, **request)
        texts: dict[int, str] = {}
        token_ids: list[int] = []
        done: DoneEvent | None = None
        try:
            async for event in self.stream(request_id, timeout_s=timeout_s):
                if isinstance(event, TokensEvent):
                    texts[event.choice] = texts.get(event.choice, "") + event.text
                    if event.choice == 0:
                        token_ids += event.token_ids
                elif isinstance(event, DoneEvent):
                    done = event
        except (TimeoutError, StreamBroken, asyncio.CancelledError):
            await self.cancel(request_id)
            raise
        assert done is not None
        return _result(done, texts, token_ids)

    async def cancel(self, request_id: str) -> None:
        """Ask the workers to stop a request; its stream then ends with finish reason `cancelled`."""
        value = encode(Cancel(request_id=request_id), self._content_type)
        await self._produce(self._control_topic, request_id, value, "cancel")
        if request_id in self._unended:
            self._unended[request_id] = True

    async def _produce(self, topic: str, request_id: str, value: bytes, kind: str) -> None:
        attributes: dict[str, AttributeValue] = {
            names.MESSAGING_SYSTEM: names.SYSTEM,
            names.MESSAGING_OPERATION_TYPE: "send",
            names.MESSAGING_OPERATION_NAME: "send",
            names.MESSAGING_DESTINATION: topic,
            names.MESSAGING_MESSAGE_ID: request_id,
            names.MESSAGING_BODY_SIZE: len(value),
        }
        with tracer.start_as_current_span(
            f"send {topic}", kind=trace.SpanKind.PRODUCER, attributes=attributes
        ):
            carrier = {headers.CONTENT_TYPE: self._content_type, headers.PLAIT_TYPE: kind}
            propagate.inject(carrier)
            try:
                await self._producer.send_and_wait(
                    topic,
                    value,
                    key=request_id.encode(),
                    headers=[(name, text.encode()) for name, text in carrier.items()],
                )
            except UnknownTopicOrPartitionError as error:
                raise UnknownTopicOrPartitionError(
                    f"there is no topic {topic}; a worker makes the topics it reads when it starts"
                ) from error

    async def _find(self, request_id: str, deadline: float) -> Inbox:
        known = self._reader.is_open(request_id)
        inbox = self._reader.open(request_id)
        if self.response_topic is None:
            await self._follow_topic_of(request_id, deadline)
        elif not known:
            self._reader.rewind(self.response_topic)
        return inbox

    async def _resume(self, position: Position) -> Inbox:
        await self._partitions(position.topic)  # that it is there
        return self._reader.reopen(position)

    async def _follow_topic_of(self, request_id: str, deadline: float) -> None:
        topic = response_topic_of(request_id)
        pause = 0.02
        # Asking for one topic by name could create it, with the brokers' defaults for its retention.
        while True:
            if topic in await self._admin.list_topics():
                with contextlib.suppress(UnknownTopicOrPartitionError):  # it has just been removed
                    return await self._reader.follow(await self._partitions(topic))
            if time.monotonic() > deadline:
                raise TimeoutError(f"no response topic {topic} was there in time: does a worker run?")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)

    async def _next(self, request_id: str, inbox: Inbox, limit: float) -> tuple[Event, Position]:
        deadline = time.monotonic() + limit
        while inbox.events.empty():
            self._reader.check()
            until = deadline
            if inbox.gap_since is not None:
                until = min(until, inbox.gap_since + self._gap_timeout_s)
            left = until - time.monotonic()
            if self.response_topic and inbox.start is None and limit - left > _ELSEWHERE_S:
                await self._look_elsewhere(request_id, inbox, left)
            if left > 0:
                # Short waits, for a gap can show while this waits.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(0.25, left)):  # no task for each event, as wait_for makes
                        return await inbox.events.get()
            elif until < deadline:
                raise StreamBroken(
                    f"event {inbox.order.next} of request {request_id} is missing, and has not come"
                    f" within {self._gap_timeout_s:g} s"
                )
            else:
                raise TimeoutError(f"no event of request {request_id} for {limit:g} s: does a worker run?")
        return inbox.events.get_nowait()

    async def _look_elsewhere(self, request_id: str, inbox: Inbox, limit: float) -> None:
        """A worker that may not write to our topic says so in the request's own."""
        topic = response_topic_of(request_id)
        if inbox.elsewhere or topic == self.response_topic:
            return
        # Of what is suppressed the last two are a timeout, and aiokafka's admin client while it reconnects.
        with contextlib.suppress(KafkaError, OSError, AttributeError):
            async with asyncio.timeout(max(0.0, limit)):
                if time.monotonic() - self._listed > _ELSEWHERE_S:
                    self._listed = time.monotonic()  # before it is there: one listing serves all that wait
                    self._topics = frozenset(await self._admin.list_topics())
                if topic in self._topics:
                    await self._reader.follow(await self._partitions(topic))
                    inbox.elsewhere = True

    async def _make_topic(self, topic: str) -> None:
        errors, _ = await create(self._admin, {topic: (1, {"retention.ms": "3600000"})}, -1)
        for name, (error, _) in errors.items():
            if error not in (NoError, TopicAlreadyExistsError):
                raise error(f"could not create the response topic {name}")

    async def _partitions(self, topic: str, *, made: bool = False) -> list[TopicPartition]:
        """Raises KafkaError when it is not there. One that was just `made` is waited for: brokers learn of it later
        than the controller that made it."""
        until = time.monotonic() + (_PATIENCE_S if made else 0)
        while True:
            (found,) = await self._admin.describe_topics([topic])
            if not found["error_code"]:
                return [TopicPartition(topic, p["partition"]) for p in found["partitions"]]
            if time.monotonic() >= until:
                raise for_code(found["error_code"])(f"the response topic {topic} is not there")
            await asyncio.sleep(0.05)


def _plain(value: Any) -> dict[str, Any]:
    """A model or a mapping as a dict without the fields that are not set."""
    return dict(value) if isinstance(value, Mapping) else value.model_dump(exclude_none=True)


def _result(done: DoneEvent, texts: dict[int, str], token_ids: list[int]) -> Result:
    if done.texts:
        texts = dict(enumerate(done.texts))
    elif done.text is not None:
        texts = {0: done.text}
    return Result(
        request_id=done.request_id,
        text=texts.get(0, ""),
        token_ids=done.token_ids or token_ids,
        finish_reason=done.finish_reason,
        usage=done.usage,
        timing=done.timing,
        texts=[texts[choice] for choice in sorted(texts)],
    )
