"""A request between its submission and its end, as the process that submitted it sees it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any

from plait.engine.api import Finish, GenerationRequest, OnOutput, Output, Timeline, TokenLogprob
from plait.engine.text import TextStream

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Live:
    request: GenerationRequest
    on_output: OnOutput
    text: TextStream
    timeline: Timeline
    produced: list[int] = field(default_factory=list)
    sent: bool = False
    """The engine that runs now has it."""
    running: bool = False
    """That engine has begun to compute it."""
    since: int = 0
    """Tokens that came from that engine."""
    crashes: int = 0
    """Crashes in a row that it may be to blame for."""
    cancelled: bool = False
    over: bool = False

    @property
    def id(self) -> str:
        return self.request.request_id

    def resumed(self) -> GenerationRequest:
        """What to ask an engine for that knows nothing of it."""
        return replace(self.request, output_token_ids=list(self.produced))

    def advance(self, tokens: list[int], logprob: list[Any] | None, finish: list[Any] | None) -> None:
        """Take what the engine sent and tell it on. Tokens after a stop string are dropped."""
        if self.text.stopped:
            tokens = []
        pieces = []
        for token in tokens:
            self.produced.append(token)
            self.since += 1
            ends = finish and finish[0] == "stop" and not self.request.sampling.include_stop_str_in_output
            if not ends:
                pieces.append(self.text.push(token))
            if self.timeline.first_token is None:
                self.timeline.first_token = time.monotonic()
        details = None
        if logprob and tokens:
            token, value, top = logprob
            details = [TokenLogprob(token, value, [(i, p) for i, p in top])]
        output = Output(self.id, tokens, "".join(pieces), details)
        if finish:
            self.close(output, finish)
        elif tokens:
            self._tell(output)

    def close(self, output: Output, finish: list[Any]) -> None:
        """The engine's last word on it."""
        reason, (code, message, retry_after), scheduled, first, finished, preemptions, swaps, cached = finish
        t = self.timeline
        t.scheduled = t.scheduled or scheduled
        t.first_token = min((x for x in (t.first_token, first) if x is not None), default=None)
        t.finished = finished
        t.preemptions += preemptions
        t.swaps += swaps
        if self.text.stopped:
            reason = "stop"
        if reason == "error":
            code = code or "internal"
        self.end(reason, code, message, output, cached, retry_after)

    def end(
        self,
        reason: Any,
        code: str | None = None,
        message: str | None = None,
        output: Output | None = None,
        cached: int = 0,
        retry_after: float | None = None,
    ) -> None:
        """Tell its end, once; the text that was held back comes with it."""
        if self.over:
            return
        self.over = True
        self.timeline.finished = self.timeline.finished or time.monotonic()
        output = output or Output(self.id)
        output.text += self.text.finish()
        output.finish = Finish(
            reason,
            self.timeline,
            len(self.request.prompt_token_ids),
            len(self.produced),
            cached,
            code,
            message,
            retry_after,
        )
        self._tell(output)

    def _tell(self, output: Output) -> None:
        try:
            self.on_output(output)
        except Exception:
            log.exception("the output of request %s is lost: its receiver failed", self.id)
