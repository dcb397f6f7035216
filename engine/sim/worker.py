"""One worker's engine, simulated: the loop of `plait.engine.engine`, with a clock and a device made of arithmetic."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from plait.engine.api import ModelInfo, RequestRefused, check
from plait.engine.assemble import make_scheduler
from plait.engine.config import EngineConfig
from plait.engine.sequence import Chunk, Sequence
from plait.engine.sim.mix import Job
from plait.engine.sim.profile import Profile


@dataclass(slots=True)
class Answer:
    """How a job ended: the sequence that was made of it, or the code with which it was refused."""

    job: Job
    seq: Sequence | None = None
    code: str | None = None


class Worker:
    """Runs jobs to their ends. `now` is the simulated time: seconds after the trace's first request."""

    def __init__(self, profile: Profile, config: EngineConfig, seed: int = 0):
        self.now = 0.0
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
        self.scheduler = make_scheduler(config, profile.num_blocks, profile.device, lambda: self.now)
        self.answers: list[Answer] = []
        self._iteration = profile.iteration
        self._max_in_flight = config.max_running + config.max_waiting
        self._random = random.Random(seed)
        self._in_flight: dict[Sequence, tuple[Answer, int]] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []

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
            self._expire()
            self._step()
        return self.answers

    def _add(self, job: Job) -> None:
        answer = Answer(job)
        self.answers.append(answer)
        try:
            check(job.request, self.model)
            if len(self._in_flight) >= self._max_in_flight:
                raise RequestRefused("overloaded", "max_waiting", "too many requests are in flight")
        except RequestRefused as error:
            answer.code = error.code
            return
        answer.seq = seq = Sequence.of(job.request, self.now)
        full = seq.prompt_len + min(job.output, job.request.sampling.max_tokens or job.output)
        self._in_flight[seq] = answer, min(full, self.model.max_tokens_total)
        if seq.slo.deadline is not None and not seq.slo.serve_late:
            heappush(self._deadlines, (seq.slo.deadline, len(self.answers), seq))
        self.scheduler.add(seq)

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self.now:
            seq = heappop(self._deadlines)[2]
            if seq in self._in_flight:
                self._in_flight.pop(seq)[0].code = "deadline_exceeded"
                self.scheduler.finish(seq, "error", "deadline_exceeded")

    def _step(self) -> None:
        chunks = self.scheduler.schedule()
        if not chunks:
            self.now += self.scheduler.pause()
            return
        self.iterations += 1
        seconds = self._seconds(chunks)
        self.now += seconds
        self.busy += seconds
        self.scheduler.advance(chunks)
        self.scheduler.took(seconds)
        for chunk in chunks:
            seq = chunk.seq
            if seq.computed == len(seq.tokens):
                self._append(seq)

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
        if len(tokens) >= self._in_flight[seq][1]:
            del self._in_flight[seq]
            self.scheduler.finish(seq, "stop")
