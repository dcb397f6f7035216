"""Everything an engine can be told, with defaults that suit a small model on a CPU and a large one on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

TOKEN_BUDGET = {"cpu": 256}


@dataclass(slots=True)
class EngineConfig:
    """Zero means "by device or model" wherever zero makes no sense as a value."""

    model: str = "smollm2"
    """`smollm2` (bundled), a local directory, a .gguf file, or a hub id."""
    dtype: str = "auto"
    """auto (bfloat16 where the hardware has it, else float32), bfloat16, float16, float32, or int8: weights rounded to
    8 bits, on the CPU."""
    device: str = "auto"
    max_running: int = 64
    """Sequences that share one iteration at most: more raises throughput and the time per token."""
    max_waiting: int = 10_000
    """Sequences that wait at most; the next one is refused with `overloaded`."""
    token_budget: int = 0
    """Tokens computed in one iteration at most: more fills prompts faster and stalls decodes longer. Less are computed
    where sequences that decode would miss their time per token."""
    block_size: int = 16
    num_blocks: int = 0
    kv_cache_bytes: int = 0
    """Size of the KV pool when num_blocks is 0: by default 1 GiB on a CPU, what is left on a GPU."""
    max_model_len: int = 0
    """Prompt plus output of one sequence at most; never more than the model's or the pool's."""
    policy: str = "default"
    """Who runs next: default, fcfs, spt, priority, fair or slo."""
    admission: str = "auto"
    """predict: refuse what will probably miss its objectives; off; auto: predict for `default` and `slo`."""
    batching: str = "continuous"
    """continuous; dynamic and static are there to be compared with."""
    batch_window_ms: float = 0.0
    """How long an idle engine waits for company before it starts a batch."""
    max_wait_seconds: float = 600.0
    """After so long a sequence comes before all that arrived later, whatever the policy."""
    aging_seconds: float = 10.0
    """So much waiting counts as much as one level of priority (policies `default` and `priority`)."""
    tenant_weights: dict[str, float] = field(default_factory=dict)
    """Share of a tenant beside the others' (policies `default` and `fair`); 1 for those not named."""
    long_tokens: int = 0
    """Prompt plus expected answer from which a sequence counts as long; 0: none does."""
    long_share: float = 0.25
    """Share of the seats, and of the prompt tokens while others wait, that long sequences have together at most."""
    max_preemptions: int = 3
    """After so many preemptions a sequence comes before all others and is not preempted for them any more."""
    watermark: float = 0.02
    """Share of the pool that stays free when a sequence is admitted, so that running ones can grow."""
    high_watermark: float = 0.1
    """The same after a sequence had to give up its memory, until one has ended."""
    record: str = ""
    """A file for what the scheduler did with the first requests, for `plait trace-view`; written when the engine
    becomes idle and at its end."""
    preemption: str = "auto"
    """What becomes of a preempted sequence's KV: `swap` copies it to the CPU pool while that has room, `recompute`
    drops it, `auto` does what a cost model fitted to this machine says is cheaper."""
    swap_bytes: int = -1
    """Size of the CPU pool for preempted sequences and for what falls out of the prefix cache; 0 for none. By default 1
    GiB beside a CPU and 4 GiB (pinned) beside a GPU, or a quarter of the free memory if that is less."""
    prefix_cache: bool = True
    """Whether prompts of one tenant that begin alike share the KV of their full blocks."""
    threads: int = 0
    """Threads of the CPU device: by default the processors this process may use."""
    cuda_graphs: bool = True
    """On a GPU capture iterations that only decode at start, and replay them: a longer start, less time per token."""
    vocab_size: int = 0
    """Tokens the tokenizer knows; ids above it (padding of the model's output) are never sampled."""
    stall_seconds: float = 120.0
    """An engine process that is silent for so long is taken for dead and restarted."""
    max_restarts: int = 3
    """A request that was running in so many crashes in a row ends with an error."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_waiting", "block_size", "max_restarts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in (
            "token_budget",
            "num_blocks",
            "kv_cache_bytes",
            "max_model_len",
            "threads",
            "max_preemptions",
            "batch_window_ms",
            "max_wait_seconds",
            "aging_seconds",
            "long_tokens",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative: {getattr(self, name)}")
        for name in ("watermark", "high_watermark", "long_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < inf:
                raise ValueError(f"tenant_weights[{tenant!r}] must be above 0, not {weight}")
        if self.admission not in ("auto", "predict", "off"):
            raise ValueError(f"admission must be auto, predict or off, not {self.admission!r}")
        if self.batching not in ("continuous", "dynamic", "static"):
            raise ValueError(f"batching must be continuous, dynamic or static, not {self.batching!r}")
        if self.preemption not in ("auto", "swap", "recompute"):
            raise ValueError(f"preemption must be auto, swap or recompute, not {self.preemption!r}")
        if self.swap_bytes < -1:
            raise ValueError(f"swap_bytes must not be negative, but for -1, by device: {self.swap_bytes}")
        if self.preemption == "swap" and self.swap_bytes == 0:
            raise ValueError(
                "preemption = swap needs a CPU pool: set swap_bytes above 0, or preemption to auto"
            )
        if self.dtype not in ("auto", "bfloat16", "float16", "float32", "int8"):
            raise ValueError(f"dtype must be auto, bfloat16, float16, float32 or int8, not {self.dtype!r}")

    def budget(self, device: str) -> int:
        """Tokens of one iteration on a kind of device."""
        return self.token_budget or TOKEN_BUDGET.get(device, 2048)
