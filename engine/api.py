"""What the engine takes and gives: plain dataclasses, no torch, no Kafka.

Times are seconds of `time.monotonic()`, which on one machine is the same clock in every process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
QUEUE_RETRY_SECONDS = 1.0
"""When to come back to a full queue: a place in it is free as soon as any request ends."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn; names and meanings are those of OpenAI and vLLM.

    `temperature` below 1e-5 is greedy. `top_k` 0 and `top_p` 1.0 switch the filter off. `max_tokens` None
    means up to the limit of the model or of the KV pool. `seed` must be an int of 64 bits by the time it
    reaches the engine: the noise of a token depends on (seed, position) alone.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


@dataclass(frozen=True, slots=True)
class Objectives:
    """When a request should be served, by the engine's clock; None where nothing was asked."""

    first_token: float | None = None
    """The moment by which its first token is due."""
    per_token: float | None = None
    """Seconds from one token to the next, on average."""
    deadline: float | None = None
    """The moment by which all of it is due."""
    serve_late: bool = False
    """Whether it is still wanted when an objective cannot be met."""


@dataclass(slots=True)
class GenerationRequest:
    """One sequence to generate. A wire request with n > 1 becomes n of these.

    `output_token_ids` holds what an earlier run already generated: the engine prefills prompt and these,
    and goes on after them with the tokens that the uninterrupted run would have drawn.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 4
    tenant: str = ""
    arrival: float = 0.0
    output_token_ids: list[int] = field(default_factory=list)
    slo: Objectives = field(default_factory=Objectives)


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of one chosen token and of the `logprobs` likeliest (id, logprob), best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Timeline:
    """When things happened to a request: monotonic seconds, None when they did not."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    preemptions: list[float] = field(default_factory=list)
    swaps: list[float] = field(default_factory=list)
    """Those of the preemptions after which it kept what it had computed, in the CPU pool."""
    restarts: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Finish:
    """How a sequence ended. `code` and `message` are set when `reason` is "error"."""

    reason: FinishReason
    timeline: Timeline
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    code: str | None = None
    message: str | None = None
    retry_after: float | None = None
    """Seconds after which it would probably be served, when `code` is overloaded; infinity: never by this worker."""


@dataclass(slots=True)
class Output:
    """News of one sequence: tokens in order, the text that has become certain, and at last a finish."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish: Finish | None = None


OnOutput = Callable[[Output], None]


@dataclass(frozen=True, slots=True)
class Told:
    """The text of tokens that were generated before: what is certain, what is held back because it may become a
    stop string, and whether one is complete."""

    text: str
    held: str = ""
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model allows. `max_tokens_total` bounds prompt plus output of one sequence: the smaller
    of the model's length and of the KV pool. Ids at or above `vocab_size` are no tokens."""

    name: str
    vocab_size: int
    max_tokens_total: int
    dtype: str
    device: str
    num_blocks: int
    block_size: int


@dataclass(slots=True)
class EngineStats:
    """One look at the engine: gauges of now, counters since its start."""

    waiting: int = 0
    running: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    iterations: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    """Preemptions after which a sequence kept what it had computed."""
    swapped_out_blocks: int = 0
    """Copied to the CPU pool, of preempted sequences and of the prefix cache."""
    swapped_in_blocks: int = 0
    host_blocks: int = 0
    """Of the CPU pool."""
    host_blocks_used: int = 0
    prefix_queried_tokens: int = 0
    """Tokens of sequences that came in and were looked up in the prefix cache."""
    prefix_hit_tokens: int = 0
    """Those of them that were there."""
    restarts: int = 0
    prediction_error: float = 0.0
    """Mean relative error of the iteration-time model over the last iterations."""
    refused: dict[str, int] = field(default_factory=dict)
    """Requests that were refused or given up as overloaded, by the objective that could not be met."""
    forecast_error: float = 0.0
    """Mean of |forecast - actual| seconds to the first token, over the last requests with objectives."""
    time: dict[str, float] = field(default_factory=dict)
    """Seconds since the start of the engine's process, by what they were spent on."""


class RequestRefused(ValueError):
    """A request that can never run, or not now: then `retry_after` says after how many seconds it probably can, where
    infinity is never. `code` is an error code of the wire, `field` names the offender."""

    def __init__(self, code: str, field: str, message: str, retry_after: float | None = None):
        super().__init__(f"{field}: {message}")
        self.code = code
        self.field = field
        self.retry_after = retry_after


def check(request: GenerationRequest, model: ModelInfo) -> None:
    """Raise RequestRefused when the model cannot run this request, before any device sees it."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    check_sampling(sampling)
    if not prompt:
        raise RequestRefused("invalid_request", "prompt", "must hold at least one token")
    if len(prompt) >= model.max_tokens_total:
        raise RequestRefused(
            "prompt_too_long",
            "prompt",
            f"has {len(prompt)} tokens; this worker takes at most {model.max_tokens_total - 1}, "
            "so that one token can follow",
        )
    if sampling.max_tokens is not None and len(prompt) + sampling.max_tokens > model.max_tokens_total:
        raise RequestRefused(
            "invalid_request",
            "sampling.max_tokens",
            f"{sampling.max_tokens} after a prompt of {len(prompt)} tokens is over the limit of "
            f"{model.max_tokens_total} tokens in all",
        )
    for name, ids in (
        ("prompt_token_ids", prompt),
        ("output_token_ids", request.output_token_ids),
        ("sampling.logit_bias", sampling.logit_bias),
        ("sampling.stop_token_ids", sampling.stop_token_ids),
    ):
        worst = next((i for i in ids if not 0 <= i < model.vocab_size), None)
        if worst is not None:
            raise RequestRefused(
                "invalid_request", name, f"token id {worst} is outside the vocabulary of {model.vocab_size}"
            )


def check_sampling(s: SamplingParams) -> None:
    """Raise RequestRefused for parameters that mean nothing."""
    for name, right, rule in (
        ("max_tokens", s.max_tokens is None or s.max_tokens >= 1, "must be at least 1"),
        ("min_tokens", s.min_tokens >= 0, "must not be negative"),
        ("temperature", 0 <= s.temperature < math.inf, "must be finite and not negative"),
        ("top_p", 0 < s.top_p <= 1, "must be in (0, 1]"),
        ("min_p", 0 <= s.min_p <= 1, "must be in [0, 1]"),
        ("presence_penalty", math.isfinite(s.presence_penalty), "must be finite"),
        ("frequency_penalty", math.isfinite(s.frequency_penalty), "must be finite"),
        ("repetition_penalty", 0 < s.repetition_penalty < math.inf, "must be finite and above 0"),
        ("logit_bias", all(bias < math.inf for bias in s.logit_bias.values()), "must hold numbers"),
        ("seed", -(2**63) <= s.seed < 2**64, "must fit into 64 bits"),
        ("logprobs", s.logprobs is None or s.logprobs >= 0, "must not be negative"),
        ("stop", all(s.stop), "must not hold an empty string"),
    ):
        if not right:
            raise RequestRefused("invalid_request", f"sampling.{name}", rule)
