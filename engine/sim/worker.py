"""One worker's engine, simulated: the loop of `plait.engine.engine`, with a clock and a device made of arithmetic."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from plait.engine.admission import make_admission
from plait.engine.api import ModelInfo, RequestRefused, check
from plait.engine.assemble import make_scheduler
from plait.engine.config import EngineConfig
from plait.engine.recorder import Recorder
from plait.engine.sequence import Chunk, Sequence
from plait.engine.sim.copies import Copies, host_blocks
from plait.engine.sim.mix import Job
from plait.engine.sim.profile import Profile
from plait.engine.swap_cost import SwapCosts


@dataclass(slots=True)
class Answer:
    """How a job ended: the sequence that was made of it, or the code with which it was refused."""

    job: Job
    seq: Sequence | None = None
    code: str | None = None


class Worker:
    """Runs jobs to their ends. `now` is the simulated time: seconds after the trace's first request."""

    def __init__(
        self, profile: Profile, config: EngineConfig, seed: int = 0, recorder: Recorder | None = None
    ):
        self.now = 0.0
        self.recorder = recorder
        self.iterations = 0
        self.busy = 0.0
        self.model = ModelInfo(
            name=profile.name,
            vocab_size=profile.vocab_size,
            max_tokens_total=profile.max_tokens_total,
            dtype="",
            device=profile.device,
            num_blocks=profile.num_blocks,
            block_size=config.block_size,
        )
        costs = SwapCosts(profile.block_bytes, config.block_size)
        self.copies = Copies(profile, costs, lambda: self.now)
        self.scheduler = make_scheduler(
            config,
            profile.num_blocks,
            profile.device,
            lambda: self.now,
            host_blocks=host_blocks(config, profile),
            mover=self.copies,
            costs=costs,
        )
        self.admission = make_admission(self.scheduler)
        self.answers: list[Answer] = []
        self._iteration = profile.iteration
        self._max_in_flight = config.max_running + config.max_waiting
        self._random = random.Random(seed)
        self._in_flight: dict[Sequence, tuple[Answer, int]] = {}

    def run(self, jobs: Iterable[Job]) -> list[Answer]:
        """Give each job to the engine when it arrives, and iterate until all have ended. Jobs are by arrival."""
        coming = iter(jobs)
        job = next(coming, None)
        while job or self.scheduler.has_work():
            if job and not self.scheduler.has_work():
                self.now = max(self.now, job.request.arrival)
            while job and job.request.arrival <= self.now:
                self._add(job)
                job = next(coming, None)
            self._end_overdue()
            if not self._step():
                # A batch gathers, until its window is over or somebody comes.
                until = self.now + self.scheduler.pause()
                self.now = min(until, max(self.now, job.request.arrival)) if job else until
        return self.answers

    def _add(self, job: Job) -> None:
        answer = Answer(job)
        self.answers.append(answer)
        try:
            check(job.request, self.model)
            if len(self._in_flight) >= self._max_in_flight:
                raise RequestRefused("overloaded", "max_waiting", "too many requests are in flight")
            seq = Sequence.of(job.request, self.now)
            self.admission.check(seq, self.now)
        except RequestRefused as error:
            answer.code = error.code
            return
        answer.seq = seq
        full = seq.prompt_len + min(job.output, job.request.sampling.max_tokens or job.output)
        self._in_flight[seq] = answer, min(full, self.model.max_tokens_total)
        self.scheduler.add(seq)
        if self.recorder:
            self.recorder.add(seq)

    def _end_overdue(self) -> None:
        for seq in self.admission.overdue(self.now):
            self._in_flight.pop(seq)[0].code = seq.code
            self.scheduler.finish(seq, "error", seq.message)

    def _step(self) -> bool:
        """One iteration; False when there is none to do."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return False
        if self.recorder:
            self.recorder.note(chunks, self.now)
        self.iterations += 1
        # What is still being copied in is waited for, by an iteration that needs it.
        self.now = max([self.now, *(c.seq.arriving.end for c in chunks if c.seq.arriving)])
        seconds = self.copies.take() + self._seconds(chunks)
        self.now += seconds
        self.busy += seconds
        self.scheduler.advance(chunks)
        self.scheduler.took(seconds)
        for chunk in chunks:
            seq = chunk.seq
            if seq.computed == len(seq.tokens):
                self._append(seq)
        return True

    def _seconds(self, chunks: list[Chunk]) -> float:
        seconds = self._iteration.seconds(chunks)
        if noise := self._iteration.noise:
            seconds *= max(0.5, self._random.gauss(1.0, noise))
        return seconds

    def _append(self, seq: Sequence) -> None:
        tokens = seq.tokens
        tokens.append(0)
        if seq.timeline.first_token is None:
            seq.timeline.first_token = self.now
            self.admission.began(seq, self.now)
        if len(tokens) >= self._in_flight[seq][1]:
            del self._in_flight[seq]
            self.scheduler.finish(seq, "stop")
