"""Counts tokens as exactly as what is installed allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.service.chunking import CountTokens

if TYPE_CHECKING:
    from plait.service.engine_port import EngineLike

# English has about four bytes a token; other languages and code have fewer.
_BYTES_PER_TOKEN = 2


def counter(engine: EngineLike | None, model: str) -> tuple[CountTokens, str]:
    """A function that counts the tokens of a text, and a note when it only estimates.

    Blocks while it loads.
    """
    if engine is not None:
        tokenizer = engine.tokenizer
        return (lambda text: len(tokenizer.encode(text))), ""
    try:
        from plait.engine.models import ModelUnavailable, resolve
        from plait.engine.tokenizer import Tokenizer
    except ImportError:
        return estimate, "token counts are estimated (for exact ones: pip install 'plait[engine]')"
    try:
        loaded = Tokenizer(resolve(model))
    except ModelUnavailable as error:
        return estimate, f"token counts are estimated: {error}"
    return (lambda text: len(loaded.encode(text))), ""


def estimate(text: str) -> int:
    """At least as many tokens as most tokenizers make of a text: one per two bytes."""
    return -(-len(text.encode()) // _BYTES_PER_TOKEN)
