"""Joins the text of a continued sequence to what was published of it, without a gap and without a repetition."""

from __future__ import annotations

from plait.engine.api import Output, Told
from plait.service.history import Published


class Mismatch(Exception):
    """The published text is not that of the published tokens: another tokenizer wrote it."""


class Joint:
    """One choice of a resumed request.

    `told` is the text of the published tokens as the engine writes it, `before` that without the last one. Events are
    cut anywhere when they are too large, so the published text may be behind the tokens or ahead of them; at the end
    of a sequence it also holds what had been held back. Raises Mismatch when neither is a beginning of the other.
    """

    def __init__(self, published: Published, told: Told, before: Told) -> None:
        self._published = published.text
        self._before = before
        self._stopped = told.stopped
        self._tokens = len(published.token_ids)
        self._missing = ""
        self._surplus = ""
        self._began = False
        if told.text.startswith(published.text):
            self._missing = told.text[len(published.text) :]
        elif published.text.startswith(told.text):
            self._surplus = published.text[len(told.text) :]
        elif not published.text.startswith(before.text):
            raise Mismatch
        else:
            # The last token ended the sequence and has no text: `output` must find that it has ended.
            self._surplus = published.text

    def take(self, output: Output, keeps_stop: bool) -> None:
        """Change an output of the engine so that its text follows what was published. Raises Mismatch."""
        finish = output.finish
        if not self._began and not output.token_ids and finish is not None and finish.reason == "stop":
            if self._tokens and not self._stopped and not keeps_stop:
                # The last published token was the one that ends a sequence: it has no text.
                whole = self._before.text + self._before.held
                self._missing, self._surplus, output.text = "", "", ""
                if not whole.startswith(self._published):
                    raise Mismatch
                self._missing = whole[len(self._published) :]
        self._began = True
        text = output.text
        if self._surplus:
            size = min(len(self._surplus), len(text))
            if text[:size] != self._surplus[:size]:
                raise Mismatch
            self._surplus, text = self._surplus[size:], text[size:]
        output.text, self._missing = self._missing + text, ""
