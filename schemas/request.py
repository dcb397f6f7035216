"""The request: what a producer asks for."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from plait.schemas.names import MAX_INT32, MAX_SAFE_INT, TENANT_PATTERN, RequestId, TokenId, Topic
from plait.schemas.plain import find_problem

STRICT = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())

MAX_METADATA_BYTES = 16_384
MAX_METADATA_DEPTH = 8
MAX_PROMPT_TOKENS = 1_048_576
MAX_REF_BYTES = 2**30
URL_PATTERN = r"^[a-z][a-z0-9+.-]*://[!-~]+$"
INPUTS = ("prompt", "messages", "prompt_token_ids", "prompt_ref")


def drop_nulls(fields: Any) -> Any:
    """Null means absent: many languages write a missing value so."""
    if isinstance(fields, dict) and None in fields.values():
        return {key: value for key, value in fields.items() if value is not None}
    return fields


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _int_keys(bias: Any) -> Any:
    """Token ids as integers: a JSON object can only have them as text."""
    if not isinstance(bias, dict):
        return bias
    result: dict[Any, Any] = {}
    for key, value in bias.items():
        token = key
        if isinstance(key, str):
            token = int(key) if key.isascii() and key.isdecimal() and len(key) <= 10 else -1
        if type(token) is not int or not 0 <= token <= MAX_INT32:
            raise PydanticCustomError(
                "token_id", f"keys must be token ids of 0 to {MAX_INT32}, as decimal digits"
            )
        if token in result:
            raise PydanticCustomError("token_id", f"token id {token} is given twice")
        result[token] = value
    return result


def _check_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    problem = find_problem(metadata, depth=MAX_METADATA_DEPTH)
    if problem:
        raise PydanticCustomError(
            "metadata", problem[1].replace("{", "(").replace("}", ")"), {"path": problem[0]}
        )
    if len(json.dumps(metadata, ensure_ascii=False, separators=(",", ":")).encode()) > MAX_METADATA_BYTES:
        raise PydanticCustomError("metadata", f"must be at most {MAX_METADATA_BYTES} bytes as compact JSON")
    return metadata


Metadata = Annotated[dict[str, Any], AfterValidator(_check_metadata)]
_StopString = Annotated[str, Field(min_length=1, max_length=1024)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
Stop = Annotated[
    list[_StopString],
    Field(max_length=16),
    BeforeValidator(
        _as_list, json_schema_input_type=_StopString | Annotated[list[_StopString], Field(max_length=16)]
    ),
]
LogitBias = Annotated[
    dict[int, _Bias],
    Field(max_length=1024, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}}),
    BeforeValidator(_int_keys),
]
TopK = Annotated[int, Field(ge=-1, le=MAX_INT32), AfterValidator(lambda k: max(k, 0))]


class Message(BaseModel):
    """One turn of a chat."""

    model_config = STRICT

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str


class PromptRef(BaseModel):
    """Where the prompt lies, as UTF-8 text, and how to tell that it is the right one. `size` is in bytes, `sha256`
    in hexadecimal digits."""

    model_config = STRICT

    url: str = Field(pattern=URL_PATTERN, max_length=2048)
    size: int = Field(ge=1, le=MAX_REF_BYTES)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    _nulls = model_validator(mode="before")(drop_nulls)


class Sampling(BaseModel):
    """How tokens are drawn; names and meanings are those of OpenAI and vLLM.

    `temperature` below 1e-5 is greedy; `top_k` 0 or -1 and `top_p` 1 switch the filter off. Without
    `max_tokens` the limit is that of the model; without `seed` the worker chooses one.
    """

    model_config = STRICT

    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    min_tokens: int = Field(0, ge=0, le=MAX_INT32)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: TopK = 0
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int = Field(1, ge=1, le=16)
    stop: Stop = []
    stop_token_ids: list[TokenId] = Field([], max_length=256)
    ignore_eos: bool = False
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: LogitBias = {}
    logprobs: int | None = Field(None, ge=0, le=20)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    _nulls = model_validator(mode="before")(drop_nulls)

    @model_validator(mode="after")
    def _min_below_max(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise PydanticCustomError(
                "range",
                f"{self.min_tokens} is over max_tokens ({self.max_tokens})",
                {"path": "min_tokens"},
            )
        return self


class Slo(BaseModel):
    """Objectives in milliseconds: to the first token, per token after it, and for the whole.

    `deadline_ms` counts from the request's `created_at`, as does `ttft_ms`. When an objective cannot be met any
    more, `on_miss` says whether the request is refused (`reject`) or served late (`serve`).
    """

    model_config = STRICT

    ttft_ms: int | None = Field(None, ge=1, le=86_400_000)
    tpot_ms: int | None = Field(None, ge=1, le=3_600_000)
    deadline_ms: int | None = Field(None, ge=1, le=604_800_000)
    on_miss: Literal["reject", "serve"] = "reject"


class Request(BaseModel):
    """One request. Exactly one of `prompt`, `messages`, `prompt_token_ids` and `prompt_ref` is set.

    `created_at` is in milliseconds since the epoch; `metadata` comes back in the terminal event.
    """

    model_config = STRICT

    v: Literal[1] = 1
    request_id: RequestId
    model: str | None = Field(None, min_length=1, max_length=255)
    tenant: str | None = Field(None, pattern=TENANT_PATTERN)
    prompt: str | None = Field(None, min_length=1)
    messages: list[Message] | None = Field(None, min_length=1, max_length=1024)
    prompt_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_PROMPT_TOKENS)
    prompt_ref: PromptRef | None = None
    sampling: Sampling = Sampling()
    priority: int = Field(4, ge=0, le=9)
    slo: Slo = Slo()
    response_topic: Topic | None = None
    stream: bool = True
    created_at: int | None = Field(None, ge=0, le=MAX_SAFE_INT)
    metadata: Metadata = {}

    _nulls = model_validator(mode="before")(drop_nulls)

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        given = [name for name in INPUTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise PydanticCustomError(
                "one_input",
                "exactly one of prompt, messages, prompt_token_ids and prompt_ref must be given, not "
                + (" and ".join(given) or "none"),
                {"path": given[1] if given else "prompt"},
            )
        return self
