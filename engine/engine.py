"""The engine: one loop, one iteration at a time: schedule, run, sample, emit. Usable alone, without Kafka."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from plait.engine.admission import make_admission
from plait.engine.api import (
    QUEUE_RETRY_SECONDS,
    EngineStats,
    FinishReason,
    GenerationRequest,
    ModelInfo,
    RequestRefused,
    SamplingParams,
    TokenLogprob,
    check,
)
from plait.engine.assemble import make_scheduler
from plait.engine.config import EngineConfig
from plait.engine.loader import eos_ids, load
from plait.engine.pool import OutOfMemory
from plait.engine.recorder import Recorder
from plait.engine.runner import Runner
from plait.engine.sampler import Sampler
from plait.engine.sequence import Sequence, Status
from plait.engine.stopwatch import Stopwatch

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """What an iteration brought to one sequence; when its status is FINISHED, this is the last of it."""

    seq: Sequence
    token: int | None = None
    logprob: TokenLogprob | None = None


@dataclass(slots=True)
class Counters:
    iterations: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Engine:
    """Add requests, call `step` while `has_work`. One thread; nothing here blocks but the model."""

    def __init__(
        self,
        config: EngineConfig,
        model: nn.Module | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.clock = clock
        # As many as the parent lets in: after a crash all of them come back at once, and all wait.
        self.max_in_flight = config.max_running + config.max_waiting
        model = model if model is not None else load(config)
        self.eos = eos_ids(model)
        self.runner = Runner(model, config)
        if self.runner.max_tokens_total < 2:
            raise ValueError(
                f"sequences of {self.runner.max_tokens_total} tokens leave no room for an answer: raise max_model_len, "
                "num_blocks or kv_cache_bytes"
            )
        size = model.config.get_text_config().vocab_size
        self.model = ModelInfo(
            name=config.model,
            vocab_size=min(config.vocab_size or size, size),
            max_tokens_total=self.runner.max_tokens_total,
            dtype=str(self.runner.dtype).removeprefix("torch."),
            device=str(self.runner.device),
            num_blocks=self.runner.num_blocks,
            block_size=config.block_size,
        )
        self.scheduler = make_scheduler(
            config,
            self.runner.num_blocks,
            self.runner.device.type,
            clock,
            host_blocks=self.runner.host_blocks,
            mover=self.runner.mover,
            costs=self.runner.costs,
        )
        self.admission = make_admission(self.scheduler)
        self.recorder = Recorder() if config.record else None
        self.record = Path(config.record)
        self.sampler = Sampler(config.max_running, self.model.vocab_size, self.eos)
        self.counters = Counters()
        self.watch = Stopwatch()
        self.on_admit: Callable[[list[Sequence]], None] = lambda seqs: None
        self.seqs: dict[str, Sequence] = {}

    def add(self, request: GenerationRequest) -> Progress | None:
        """Queue a request. Raises RequestRefused when it can never run, or would miss what it asks for.

        What an earlier run generated may be all there is to generate: then gives the end, and nothing runs.
        """
        if request.request_id in self.seqs:
            raise RequestRefused(
                "invalid_request", "request_id", f"{request.request_id!r} is already running"
            )
        check(request, self.model)
        if len(self.seqs) >= self.max_in_flight:
            self.admission.refused["max_waiting"] += 1
            message = f"{len(self.seqs)} requests are in flight already"
            raise RequestRefused("overloaded", "max_waiting", message, QUEUE_RETRY_SECONDS)
        now = self.clock()
        seq = Sequence.of(request, now)
        self.admission.check(seq, now)
        self.seqs[seq.id] = seq
        self.scheduler.add(seq)
        if self.recorder:
            self.recorder.add(seq)
        if seq.output_len and (reason := self._ending(seq)):
            self._finish(seq, reason)
            return Progress(seq)
        return None

    def cancel(self, request_id: str, stopped: bool = False) -> Sequence | None:
        """End a request in whatever state it is, as cancelled, or as stopped when its text met a stop string."""
        seq = self.seqs.pop(request_id, None)
        if seq is not None:
            self.scheduler.finish(seq, "stop" if stopped else "cancelled")
        return seq

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[Progress]:
        """One iteration. Gives the sequences that got a token or ended."""
        started = self.clock()
        over = self._end_overdue(started)
        chunks = self.scheduler.schedule()
        self.watch.lap("scheduling")
        if not chunks:
            return over
        if self.recorder:
            self.recorder.note(chunks, started)
        if self.scheduler.admitted:
            self.on_admit(self.scheduler.admitted)
        logits = self.runner.run(chunks)
        self.watch.lap("model")
        self.counters.prompt_tokens += sum(c.prompt_tokens for c in chunks)
        self.scheduler.advance(chunks)
        self.counters.iterations += 1
        sampling = [c.seq for c in chunks if c.seq.remaining == 0]
        if not sampling:
            self.scheduler.took(self.clock() - started)
            return over
        tokens, logprobs = self.sampler.draw(logits, sampling)
        self.watch.lap("sampling")
        self.counters.generated_tokens += len(tokens)
        now = self.clock()
        self.scheduler.took(now - started)
        return over + [
            self._append(seq, token, logprobs.get(i), now)
            for i, (seq, token) in enumerate(zip(sampling, tokens, strict=True))
        ]

    def _end_overdue(self, now: float) -> list[Progress]:
        over = self.admission.overdue(now)
        for seq in over:
            self._finish(seq, "error", seq.message)
        return [Progress(seq) for seq in over]

    def _append(self, seq: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> Progress:
        if token < 0:
            self._finish(seq, "error", "the model's output is not a number")
            return Progress(seq)
        seq.tokens.append(token)
        if seq.timeline.first_token is None:
            seq.timeline.first_token = now
            self.admission.began(seq, now)
        if reason := self._ending(seq):
            self._finish(seq, reason)
        return Progress(seq, token, logprob)

    def _ending(self, seq: Sequence) -> FinishReason | None:
        """Why a sequence ends with its last token, if it does."""
        s, token = seq.sampling, seq.tokens[-1]
        ended = (token in self.eos and not s.ignore_eos) or token in s.stop_token_ids
        if ended and seq.output_len >= s.min_tokens:
            return "stop"
        full = s.max_tokens is not None and seq.output_len >= s.max_tokens
        return "length" if full or len(seq.tokens) >= self.model.max_tokens_total else None

    def _finish(self, seq: Sequence, reason: FinishReason, message: str | None = None) -> None:
        self.scheduler.finish(seq, reason, message)
        self.seqs.pop(seq.id, None)

    def warm_up(self) -> None:
        """Capture graphs, run a prompt as long as one iteration allows and one token after it: what is compiled lazily
        is compiled now, and what does not fit into memory fails now. Raises OutOfMemory."""
        total = self.model.max_tokens_total
        length = max(1, min(self.scheduler.token_budget, total - 2))
        sampling = SamplingParams(max_tokens=min(2, total - length), ignore_eos=True)
        self.runner.warm_up()
        self.scheduler.rehearse(True)
        kv = self.scheduler.kv
        try:
            self.runner.rehearse_copies()
            self.generate([GenerationRequest("warm-up", [0] * length, sampling)])
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"an iteration of {length} tokens does not fit beside the KV pool: set num_blocks to at most "
                f"{self.model.num_blocks * 3 // 4} (now {self.model.num_blocks}), or token_budget to "
                f"{self.scheduler.token_budget // 2} (now {self.scheduler.token_budget}); the device said: {error}"
            ) from error
        self.scheduler.rehearse(False)
        kv.clear()
        kv.queried_tokens = kv.hit_tokens = 0
        self.counters = Counters()
        if self.recorder:
            self.recorder = Recorder()

    def save_record(self) -> None:
        """Write what `record` asks for, if it does."""
        if self.recorder:
            try:
                self.recorder.write(self.record)
            except OSError as error:
                log.warning("the record cannot be written: %s", error)

    def stats(self) -> EngineStats:
        s, c = self.scheduler, self.counters
        kv, host = s.kv, s.kv.store.host
        return EngineStats(
            waiting=len(s.waiting),
            running=len(s.running),
            free_blocks=kv.blocks.available,
            total_blocks=kv.blocks.num_blocks,
            iterations=c.iterations,
            prompt_tokens=c.prompt_tokens,
            generated_tokens=c.generated_tokens,
            preemptions=s.preemptions,
            prediction_error=s.times.error,
            refused=dict(self.admission.refused),
            forecast_error=self.admission.error,
            swaps=kv.swaps,
            swapped_out_blocks=kv.store.swapped_out,
            swapped_in_blocks=kv.store.swapped_in,
            host_blocks=host.num_blocks,
            host_blocks_used=host.num_blocks - len(host.free),
            prefix_queried_tokens=kv.queried_tokens,
            prefix_hit_tokens=kv.hit_tokens,
            time=self.runner.break_down(self.watch.seconds),
        )

    def generate(self, requests: Iterable[GenerationRequest]) -> dict[str, list[int]]:
        """Run requests to their ends; gives the generated ids by request id."""
        done: dict[str, list[int]] = {}
        for request in requests:
            if self.add(request):
                done[request.request_id] = list(request.output_token_ids)
        while self.has_work():
            time.sleep(self.scheduler.pause())
            for progress in self.step():
                if progress.seq.status is Status.FINISHED:
                    done[progress.seq.id] = progress.seq.tokens[progress.seq.prompt_len :]
        return done
