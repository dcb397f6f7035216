"""The events of a response: `tokens` as they come, then exactly one `done` or `error`.

Every event carries `index`, which counts 0, 1, 2, ... over the whole response without a gap; `choice`, which
of the `sampling.n` sequences it is about (0 in a terminal event); and `epoch`, which grows each time another worker
goes on with the request.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from plait.schemas.errors import ErrorCode
from plait.schemas.names import MAX_SAFE_INT, RequestId, TokenId
from plait.schemas.request import STRICT, Metadata

Count = Annotated[int, Field(ge=0, le=MAX_SAFE_INT)]
Milliseconds = Annotated[float, Field(ge=0)]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


# Strict mode would take only the enum's members, and the wire has their text.
_Reason = Annotated[FinishReason, Field(strict=False)]
_Code = Annotated[ErrorCode, Field(strict=False)]


class TopLogprob(BaseModel):
    model_config = STRICT

    token_id: TokenId
    logprob: float


class TokenLogprob(BaseModel):
    """Log-probability of a chosen token and of the likeliest ones, best first."""

    model_config = STRICT

    token_id: TokenId
    logprob: float
    top: list[TopLogprob] = []


class Usage(BaseModel):
    """Tokens, over all choices; `cached_tokens` are those of the prompt that were not computed again."""

    model_config = STRICT

    prompt_tokens: Count
    cached_tokens: Count = 0
    completion_tokens: Count


class Timing(BaseModel):
    """Milliseconds from the request's arrival at the worker; absent where the request did not get so far."""

    model_config = STRICT

    queue_ms: Milliseconds | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    total_ms: Milliseconds
    preemptions: Count = 0


class SloResult(BaseModel):
    """Which objectives were met; absent where the request had none."""

    model_config = STRICT

    ttft_met: bool | None = None
    tpot_met: bool | None = None
    deadline_met: bool | None = None


class Envelope(BaseModel):
    model_config = STRICT

    v: Literal[1] = 1
    type: str
    request_id: RequestId
    index: Count
    choice: int = Field(0, ge=0, le=15)
    epoch: Count = 0


class TokensEvent(Envelope):
    """New tokens of one choice. `text` holds whole characters only, and may lag behind `token_ids`."""

    type: Literal["tokens"] = "tokens"
    token_ids: list[TokenId]
    text: str
    logprobs: list[TokenLogprob] | None = None


class DoneEvent(Envelope):
    """The end of a response that worked, or that was cancelled.

    `finish_reason` is that of choice 0, `finish_reasons` has one per choice. The rest of the answer is here
    only for `stream: false`: `text`, `token_ids` and `logprobs` of choice 0, and `texts`, one per choice,
    when `n` is above 1.
    """

    type: Literal["done"] = "done"
    finish_reason: _Reason
    finish_reasons: list[_Reason] = Field(min_length=1, max_length=16)
    usage: Usage
    timing: Timing
    slo: SloResult = SloResult()
    text: str | None = None
    texts: list[str] | None = None
    token_ids: list[TokenId] | None = None
    logprobs: list[TokenLogprob] | None = None
    metadata: Metadata = {}


class ErrorEvent(Envelope):
    """The end of a response that failed. `retry_after_ms` is a hint, given only with `retryable`."""

    type: Literal["error"] = "error"
    code: _Code
    message: str
    retryable: bool
    retry_after_ms: Count | None = None
    metadata: Metadata = {}


Event = Annotated[TokensEvent | DoneEvent | ErrorEvent, Field(discriminator="type")]
