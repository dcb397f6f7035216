"""Text as it becomes certain: whole characters, and nothing that may yet turn out to be a stop string."""

from __future__ import annotations

from tokenizers.decoders import DecodeStream

from plait.engine.api import SamplingParams
from plait.engine.tokenizer import Tokenizer

# So many of the prompt's last tokens decide how the first token is written (a leading space, say).
CONTEXT = 6


class TextStream:
    """The text of one sequence. Half a character at the very end is dropped; its token ids are not."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, prompt: list[int]):
        self.backend = tokenizer.backend
        self.sampling = sampling
        self.held = ""
        self.count = 0
        self.stopped = False
        self._start(prompt[-CONTEXT:])

    def _start(self, context: list[int]) -> None:
        skip = self.sampling.skip_special_tokens
        self.stream = DecodeStream(ids=context, skip_special_tokens=skip)

    def push(self, token: int) -> str:
        """The text that one more token makes certain. Sets `stopped` when it completes a stop string."""
        self.count += 1
        piece = self._decode(token)
        if not self.sampling.stop or self.count < self.sampling.min_tokens:
            return piece
        self.held += piece
        return self._release()

    def finish(self) -> str:
        """The sequence ended: what was held back after all."""
        rest, self.held = self.held, ""
        return rest

    def _decode(self, token: int) -> str:
        try:
            return self.stream.step(self.backend, token) or ""
        except Exception:
            # The stream refuses sequences whose bytes change what came before (tokenizers#1666): begin anew.
            self._start([])
            return self.stream.step(self.backend, token) or ""

    def _release(self) -> str:
        found = [(at, stop) for stop in self.sampling.stop if (at := self.held.find(stop)) >= 0]
        if found:
            self.stopped = True
            at, stop = min(found)
            out = self.held[: at + len(stop)] if self.sampling.include_stop_str_in_output else self.held[:at]
            self.held = ""
            return out
        keep = max(overlap(self.held, stop) for stop in self.sampling.stop)
        out, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return out


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
