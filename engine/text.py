"""Text as it becomes certain: whole characters, and nothing that may yet turn out to be a stop string."""

from __future__ import annotations

from plait.engine.api import SamplingParams
from plait.engine.tokenizer import Tokenizer

# So many of the prompt's last tokens decide how the first token is written (a leading space, say).
CONTEXT = 6
# Tokens without a whole character among them that are kept, lest their decoding takes ever longer.
LONGEST = 64
HALF = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Ids to text piece by piece: together the pieces are the text of all ids, without a half character at its end.

    Each piece is what one more token adds to the text of the tokens just before it, since how a token is written
    depends on these (as in Hugging Face's text-generation-inference, MIT).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt: list[int]):
        self.backend = tokenizer.backend
        self.skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._keep([i for i in prompt if i not in self.skipped][-CONTEXT:])

    def _keep(self, ids: list[int]) -> None:
        self.ids, self.told, self.before = ids, self._text(ids), len(ids)

    def _text(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)

    def push(self, token: int) -> str:
        """What became certain with one more token; a character is held back until its last byte is there."""
        if token in self.skipped:
            return ""
        self.ids.append(token)
        text = self._text(self.ids)
        whole = text.rstrip(HALF)
        told = self.told if text.startswith(self.told) else self.told.rstrip(HALF)
        piece = whole[len(told) :]
        if len(self.ids) > LONGEST:
            self._keep(self.ids[-CONTEXT:])
        elif piece and whole == text:
            self._keep(self.ids[self.before :])
        elif piece:
            self.told = whole
        return piece


class TextStream:
    """The text of one sequence, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, prompt: list[int]):
        self.sampling = sampling
        self.held = ""
        self.count = 0
        self.stopped = False
        self.pieces = Detokenizer(tokenizer, sampling.skip_special_tokens, prompt)

    def push(self, token: int) -> str:
        """The text that one more token makes certain. Sets `stopped` when it completes a stop string."""
        self.count += 1
        piece = self.pieces.push(token)
        if not self.sampling.stop or self.count < self.sampling.min_tokens:
            return piece
        self.held += piece
        return self._release()

    def finish(self) -> str:
        """The sequence ended: what was held back after all."""
        rest, self.held = self.held, ""
        return rest

    def _release(self) -> str:
        found = [(at + len(stop), at) for stop in self.sampling.stop if (at := self.held.find(stop)) >= 0]
        if found:
            self.stopped = True
            # The one that is complete first: so it does not matter how the text is cut into tokens.
            end, start = min(found)
            out = self.held[: end if self.sampling.include_stop_str_in_output else start]
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
