"""The engine's own record of one sequence, and of its share in one iteration."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from plait.engine.api import FinishReason, GenerationRequest, Objectives, SamplingParams, Timeline
from plait.engine.prefix_cache import Page
from plait.engine.transfer import Transfer


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` holds prompt and output; the KV of the first `computed` of them is in `blocks`."""

    id: str
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    priority: int
    tenant: str
    timeline: Timeline
    slo: Objectives = field(default_factory=Objectives)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    """Of the first of `blocks`, while it runs; of all that it computed, while it is swapped out; else what the prefix
    cache had when it was last asked."""
    replaced: int = 0
    """How often a block of it was replaced by another one of the same content."""
    arriving: Transfer | None = None
    """The copy that brings in what it computed before, while that is under way."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had when it first ran."""
    status: Status = Status.WAITING
    preemptions: int = 0
    number: int = 0
    """Order in which the scheduler got to know it."""
    key: float = 0.0
    """Its place among those that wait in the same lane, as the policy set it."""
    expires: float = inf
    """The moment from which the key is to be made anew."""
    late: bool = False
    """It cannot be served in time any more, when the policy looked last."""
    long: bool = False
    """It is kept apart from the shorter ones."""
    lane: tuple[object, ...] = ()
    ticket: int = -1
    """Of its last entry in the waiting queue; earlier ones are void."""
    skipped: int = 0
    """Iterations in a row that went by without it."""
    charged: int = 0
    """Tokens that its tenant has been charged for."""
    seat: int = -1
    expected: float | None = None
    """The moment for which admission expects its first token."""
    reason: FinishReason | None = None
    code: str | None = None
    message: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, request: GenerationRequest, now: float) -> Sequence:
        return cls(
            id=request.request_id,
            tokens=[*request.prompt_token_ids, *request.output_token_ids],
            prompt_len=len(request.prompt_token_ids),
            sampling=request.sampling,
            priority=request.priority,
            tenant=request.tenant,
            timeline=Timeline(arrived=request.arrival or now),
            slo=request.slo,
        )

    @property
    def remaining(self) -> int:
        """Tokens known but not computed: 1 while decoding, more while prefilling."""
        return len(self.tokens) - self.computed

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(slots=True)
class Chunk:
    """`count` tokens of a sequence, from its `computed` on, chosen for this iteration."""

    seq: Sequence
    count: int

    @property
    def prompt_tokens(self) -> int:
        """How many of them belong to the prompt."""
        return max(0, min(self.count, self.seq.prompt_len - self.seq.computed))

    @property
    def samples(self) -> bool:
        """Whether the last known token is in the chunk, so that a next one can be drawn."""
        return self.seq.computed + self.count == len(self.seq.tokens)
