"""Joins the text of a continued sequence to what was published of it, without a gap and without a repetition."""

from __future__ import annotations

from collections.abc import Callable

from plait.engine.api import Output, SamplingParams, Told
from plait.service.history import Published


class Mismatch(Exception):
    """The published text is not that of the published tokens: another tokenizer wrote it."""

    def __init__(self) -> None:
        super().__init__(
            "the published beginning of this answer is not what this worker's tokenizer makes of it"
        )


class Joint:
    """One choice of a resumed request.

    `told` is the text of the published tokens as the engine writes it, `before` makes that without the last token.
    Events are cut anywhere when they are too large, so the published text may be behind the tokens or ahead of them;
    at the end of a sequence it also holds what had been held back. Raises Mismatch when neither is a beginning of the
    other.
    """

    def __init__(
        self, published: Published, told: Told, before: Callable[[], Told], sampling: SamplingParams
    ) -> None:
        self._published = published.text
        self._before = before
        # Whether the last token may be one that ends a sequence and has no text.
        self._silent = not told.stopped and bool(published.token_ids)
        self._silent &= not sampling.include_stop_str_in_output
        self._missing = ""
        self._surplus = ""
        if told.text.startswith(published.text):
            self._missing = told.text[len(published.text) :]
        elif published.text.startswith(told.text):
            self._surplus = published.text[len(told.text) :]
        elif not published.text.startswith(before().text):
            raise Mismatch
        else:
            # The last token ended the sequence: the first output must say so.
            self._surplus = published.text

    def take(self, output: Output) -> None:
        """Change an output of the engine so that its text follows what was published. Raises Mismatch."""
        finish = output.finish
        if self._silent and not output.token_ids and finish is not None and finish.reason == "stop":
            before = self._before()
            whole = before.text + before.held
            if not whole.startswith(self._published):
                raise Mismatch
            self._missing, self._surplus, output.text = whole[len(self._published) :], "", ""
        self._silent = False
        text = output.text
        if self._surplus:
            size = min(len(self._surplus), len(text))
            if text[:size] != self._surplus[:size]:
                raise Mismatch
            self._surplus, text = self._surplus[size:], text[size:]
        output.text, self._missing = self._missing + text, ""
