"""Builds the events of one request: their numbers, their sizes, and the terminal one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.engine.api import Finish, Output, Timeline
from plait.engine.api import TokenLogprob as EngineLogprob
from plait.schemas import (
    DoneEvent,
    ErrorCode,
    ErrorEvent,
    FinishReason,
    Request,
    SloResult,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
    encode,
    tokens_event_bytes,
)


@dataclass(slots=True)
class Piece:
    """Tokens of one choice that belong into one event."""

    choice: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[EngineLogprob] | None = None

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.text += output.text
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + output.logprobs


def merge(news: Iterable[tuple[int, Output]]) -> list[Piece]:
    """Neighbouring outputs of one choice as one piece: what gathers while the producer is behind."""
    pieces: list[Piece] = []
    for choice, output in news:
        if output.token_ids or output.text:
            if not pieces or pieces[-1].choice != choice:
                pieces.append(Piece(choice))
            pieces[-1].add(output)
    return pieces


def wire_logprobs(logprobs: Sequence[EngineLogprob] | None) -> list[TokenLogprob] | None:
    if logprobs is None:
        return None
    return [
        TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=[TopLogprob(token_id=token, logprob=value) for token, value in entry.top],
        )
        for entry in logprobs
    ]


class Answers:
    """Events of one request, each no larger than `max_bytes` (a terminal event may be, by its metadata)."""

    def __init__(self, request_id: str, content_type: str, max_bytes: int) -> None:
        self._request_id = request_id
        self._content_type = content_type
        self._max_bytes = max_bytes

    def tokens(self, piece: Piece, index: int, epoch: int) -> list[bytes]:
        """One event, or several with consecutive indexes when it would be too large."""
        value = tokens_event_bytes(
            self._request_id,
            index,
            piece.choice,
            epoch,
            piece.token_ids,
            piece.text,
            wire_logprobs(piece.logprobs),
            self._content_type,
        )
        if len(value) <= self._max_bytes or (len(piece.token_ids) < 2 and len(piece.text) < 2):
            return [value]
        halves = self._halve(piece)
        first = self.tokens(halves[0], index, epoch)
        return first + self.tokens(halves[1], index + len(first), epoch)

    def done(self, fields: dict[str, Any], index: int, epoch: int) -> bytes:
        return encode(
            DoneEvent(request_id=self._request_id, index=index, epoch=epoch, **fields), self._content_type
        )

    def fits(self, value: bytes) -> bool:
        return len(value) <= self._max_bytes

    def error(
        self,
        code: ErrorCode,
        message: str,
        index: int,
        epoch: int,
        *,
        retryable: bool,
        retry_after_ms: int | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> bytes:
        event = ErrorEvent(
            request_id=self._request_id,
            index=index,
            epoch=epoch,
            code=code,
            message=message,
            retryable=retryable,
            retry_after_ms=retry_after_ms if retryable else None,
            metadata=metadata or {},
        )
        return encode(event, self._content_type)

    def _halve(self, piece: Piece) -> tuple[Piece, Piece]:
        tokens, characters = len(piece.token_ids) // 2, len(piece.text) // 2
        first = Piece(piece.choice, piece.token_ids[:tokens], piece.text[:characters])
        second = Piece(piece.choice, piece.token_ids[tokens:], piece.text[characters:])
        if piece.logprobs is not None:
            first.logprobs, second.logprobs = piece.logprobs[:tokens], piece.logprobs[tokens:]
        return first, second


def whole_answer(held: list[Piece], n: int) -> dict[str, Any]:
    """The fields of a terminal event that carries everything."""
    texts, ids = [""] * n, []
    logprobs: list[EngineLogprob] | None = None
    for piece in held:
        texts[piece.choice] += piece.text
        if piece.choice == 0:
            ids += piece.token_ids
            if piece.logprobs is not None:
                logprobs = (logprobs or []) + piece.logprobs
    whole: dict[str, Any] = {"text": texts[0], "token_ids": ids, "logprobs": wire_logprobs(logprobs)}
    return whole | ({"texts": texts} if n > 1 else {})


@dataclass(frozen=True, slots=True)
class Summary:
    """What one request took, over its choices."""

    usage: Usage
    timing: Timing
    slo: SloResult
    reasons: list[FinishReason]


def summarize(
    request: Request, finishes: Sequence[Finish], arrived: float, waited_ms: float, now: float
) -> Summary:
    """Usage, timing and objectives from the engine's word on each choice.

    Times count from `arrived`, in monotonic seconds. The objectives count from the request's creation, which
    was `waited_ms` before that. The time per token is that of the slowest choice.
    """
    lines = [finish.timeline for finish in finishes]
    scheduled = min((t.scheduled for t in lines if t.scheduled is not None), default=None)
    first = min((t.first_token for t in lines if t.first_token is not None), default=None)
    end = max((t.finished for t in lines if t.finished is not None), default=now)
    paces = [pace for f in finishes if (pace := time_per_token(f.timeline, f.completion_tokens)) is not None]
    timing = Timing(
        queue_ms=milliseconds(arrived, scheduled),
        ttft_ms=milliseconds(arrived, first),
        tpot_ms=max(paces) * 1000 if paces else None,
        total_ms=milliseconds(arrived, end) or 0.0,
        preemptions=sum(len(t.preemptions) for t in lines),
    )
    slo = request.slo
    ttft_ms = None if timing.ttft_ms is None else timing.ttft_ms + waited_ms
    return Summary(
        usage=Usage(
            prompt_tokens=max((f.prompt_tokens for f in finishes), default=0),
            cached_tokens=min((f.cached_tokens for f in finishes), default=0),
            completion_tokens=sum(f.completion_tokens for f in finishes),
        ),
        timing=timing,
        slo=SloResult(
            ttft_met=None if slo.ttft_ms is None else ttft_ms is not None and ttft_ms <= slo.ttft_ms,
            tpot_met=None if slo.tpot_ms is None else (timing.tpot_ms or 0.0) <= slo.tpot_ms,
            deadline_met=None if slo.deadline_ms is None else timing.total_ms + waited_ms <= slo.deadline_ms,
        ),
        reasons=[FinishReason(f.reason) for f in finishes],
    )


def milliseconds(start: float, end: float | None) -> float | None:
    return None if end is None else max(0.0, (end - start) * 1000)


def time_per_token(timeline: Timeline, tokens: int) -> float | None:
    """Mean seconds per token after the first."""
    if timeline.first_token is None or timeline.finished is None or tokens < 2:
        return None
    return max(0.0, timeline.finished - timeline.first_token) / (tokens - 1)
