"""From a record to something the engine can run, or to the reason why not."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Any

from plait.engine.api import GenerationRequest, Objectives, SamplingParams
from plait.schemas import (
    MSGPACK,
    ErrorCode,
    PromptRef,
    Request,
    Sampling,
    Slo,
    WireError,
    canonical_type,
    decode_request,
    headers,
    is_tenant,
    is_topic,
)
from plait.service.claims import ClaimFailed, ClaimRefused, Claims
from plait.service.engine_port import EngineLike
from plait.service.kafka import Unreadable
from plait.service.settings import Settings
from plait.service.telemetry import Headers, header, header_text
from plait.service.topics import Topics

# Shorter prompts are tokenized in the event loop: a thread costs more than they do.
INLINE_CHARACTERS = 2_000
MAX_ECHOED_BYTES = 4096


class Unanswerable(Exception):
    """A record whose sender cannot be told: it goes to the dead-letter topic. `kind` is one short word."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Refused(Exception):
    """A request that is answered with an `error` event."""

    def __init__(
        self, code: ErrorCode, message: str, *, retryable: bool = False, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable
        self.retry_after_ms = retry_after_ms


@dataclass(slots=True)
class Incoming:
    """A record as far as it could be read: whom to answer, and the request or why it is refused."""

    request_id: str
    content_type: str
    topic: str
    request: Request | None
    refusal: Refused | None = None
    echoed: list[tuple[str, bytes | None]] = field(default_factory=list)


class Admission:
    """Decides what may run. Knows the engine's model and limits, and plait's own topics."""

    def __init__(self, settings: Settings, engine: EngineLike, topics: Topics, claims: Claims) -> None:
        self._engine = engine
        self._topics = topics
        self._claims = claims
        self._tenant_header = settings.worker.tenant_header
        self._priorities = {lane.topic: lane.priority for lane in settings.topics.all_lanes()}
        self._names = {settings.engine.model, *settings.worker.model_aliases}

    def read(self, record: Any) -> Incoming:
        """Decode a record. Raises Unanswerable when nobody can be answered."""
        if isinstance(record, Unreadable):
            raise Unanswerable("unreadable", f"the record cannot be decoded, see it there: {record.error}")
        if record.value is None:
            raise Unanswerable("tombstone", "the message has no value")
        echoed: list[tuple[str, bytes | None]] = [
            (name, value)
            for name in headers.CORRELATION_IDS
            if (value := header(record.headers, name)) is not None
        ]
        problem = None
        if (size := sum(len(value or b"") for _, value in echoed)) > MAX_ECHOED_BYTES:
            problem = (
                f"{size} bytes of correlation ids, which every event would carry: over {MAX_ECHOED_BYTES}"
            )
            echoed = []
        try:
            request, content_type = decode_request(
                record.value, header_text(record.headers, headers.CONTENT_TYPE)
            )
        except WireError as error:
            if error.request_id is None:
                raise Unanswerable("undecodable", str(error)) from None
            topic, _ = self._response_topic(error.request_id, error.response_topic, record.headers)
            found = canonical_type(error.content_type) or MSGPACK
            refusal = Refused(error.code, str(error))
            return Incoming(error.request_id, found, topic, None, refusal, echoed)
        topic, topic_problem = self._response_topic(
            request.request_id, request.response_topic, record.headers
        )
        priority = self._priorities.get(record.topic)
        if priority is not None and "priority" not in request.model_fields_set:
            request = request.model_copy(update={"priority": priority})
        tenant, tenant_problem = self._tenant(request, record.headers)
        if tenant != request.tenant:
            request = request.model_copy(update={"tenant": tenant})
        problem = problem or topic_problem or tenant_problem
        refusal_ = Refused(ErrorCode.INVALID_REQUEST, problem) if problem else self._check_model(request)
        return Incoming(request.request_id, content_type, topic, request, refusal_, echoed)

    async def sequences(
        self, request: Request, prefix: str, arrived: float, created: float
    ) -> list[GenerationRequest]:
        """Tokenize and unfold `n`. Raises Refused. `prefix` makes the engine's ids unique; `arrived` and `created`
        are seconds of the monotonic clock."""
        prompt = await self._tokenize(request)
        seed = seed_of(request)
        return [
            GenerationRequest(
                request_id=f"{prefix}.{choice}",
                prompt_token_ids=prompt,
                sampling=sampling_params(request.sampling, seed + choice),
                priority=request.priority,
                tenant=request.tenant or "",
                arrival=arrived,
                slo=objectives(request.slo, created),
            )
            for choice in range(request.sampling.n)
        ]

    def _response_topic(
        self, request_id: str, named: str | None, record_headers: Headers
    ) -> tuple[str, str | None]:
        """The topic to answer on, and what is wrong with the one that was asked for."""
        own = self._topics.of(request_id)
        field_name = "response_topic"
        if named is None:
            for name in headers.REPLY_TOPICS:
                raw = header(record_headers, name)
                if raw is not None:
                    field_name, named = f"header {name}", raw.decode(errors="replace")
                    break
        if named is None:
            return own, None
        if not is_topic(named):
            return own, f"{field_name}: is not a topic name"
        if self._topics.is_own(named):
            return own, f"{field_name}: {named} is a topic of plait's own"
        if not self._topics.may_be_named(named, request_id):
            return own, f"{field_name}: {named} is not open to answers here (topics.named_responses)"
        return named, None

    def _tenant(self, request: Request, record_headers: Headers) -> tuple[str | None, str | None]:
        """Who asks, and what is wrong with it."""
        name = self._tenant_header
        if name is None:
            return request.tenant, None
        told = header_text(record_headers, name)
        if not told or not is_tenant(told):
            return (
                None,
                f"header {name}: {'is no tenant' if told else 'is missing, and names the tenant here'}",
            )
        if request.tenant is not None and request.tenant != told:
            return told, f"tenant: is not the one of header {name}"
        return told, None

    def _check_model(self, request: Request) -> Refused | None:
        served = self._engine.model.name
        if request.model is None or request.model == served or request.model in self._names:
            return None
        known = ", ".join(sorted({served, *self._names}))
        return Refused(
            ErrorCode.MODEL_NOT_FOUND, f"model: {request.model} is not served here; this worker has {known}"
        )

    async def _tokenize(self, request: Request) -> list[int]:
        tokenizer = self._engine.tokenizer
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        prompt = request.prompt if request.prompt_ref is None else await self._fetch(request.prompt_ref)
        if prompt is not None:
            if len(prompt) <= INLINE_CHARACTERS:
                return tokenizer.encode(prompt)
            return await asyncio.to_thread(tokenizer.encode, prompt)
        messages = [message.model_dump() for message in request.messages or []]
        try:
            return await asyncio.to_thread(tokenizer.encode_chat, messages)
        except ValueError as error:
            raise Refused(ErrorCode.INVALID_REQUEST, f"messages: {error}") from error

    async def _fetch(self, ref: PromptRef) -> str:
        try:
            return await self._claims.fetch(ref)
        except ClaimRefused as error:
            raise Refused(ErrorCode.INVALID_REQUEST, f"prompt_ref.{error}") from error
        except ClaimFailed as error:
            raise Refused(ErrorCode.INTERNAL, f"prompt_ref: {error}", retryable=True) from error


def seed_of(request: Request) -> int:
    """The request's own seed, or one that a second delivery of the request derives again."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    digest = hashlib.blake2b(request.request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2  # room for + choice within 63 bits


def objectives(slo: Slo, created: float) -> Objectives:
    """The wire's milliseconds since `created` as moments of the engine's clock."""
    return Objectives(
        first_token=None if slo.ttft_ms is None else created + slo.ttft_ms / 1000,
        per_token=None if slo.tpot_ms is None else slo.tpot_ms / 1000,
        deadline=None if slo.deadline_ms is None else created + slo.deadline_ms / 1000,
        serve_late=slo.on_miss == "serve",
    )


def sampling_params(sampling: Sampling, seed: int) -> SamplingParams:
    """The engine's parameters; `seed` is reduced to 64 bits, signed."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=(seed + 2**63) % 2**64 - 2**63,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        skip_special_tokens=sampling.skip_special_tokens,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
    )
