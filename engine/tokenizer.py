"""Text to tokens and back, without torch: the process that talks to Kafka needs nothing heavier."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model directory's tokenizer and chat template."""

    def __init__(self, path: Path):
        settings = path / "tokenizer_config.json"
        config: dict[str, Any] = json.loads(settings.read_text()) if settings.is_file() else {}
        if (path / "tokenizer.json").is_file():
            self.backend = Backend.from_file(str(path / "tokenizer.json"))
        else:
            # Older repositories hold a sentencepiece model or vocabulary files; transformers converts them.
            from transformers import AutoTokenizer

            self.backend = AutoTokenizer.from_pretrained(path).backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.specials = {name: text(config[name]) for name in SPECIAL if config.get(name)}
        template = path / "chat_template.jinja"
        self.template = template.read_text() if template.is_file() else config.get("chat_template")
        if self.template:
            # A second of imports, better spent while the model loads than on the first chat.
            importlib.import_module("transformers.utils.chat_template_utils")

    def encode(self, prompt: str) -> list[int]:
        """Ids of a raw prompt, with the tokens that the model expects at its beginning."""
        return self.backend.encode(prompt).ids

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a conversation in the model's chat format, up to where the assistant speaks.

        Raises ValueError when the model has no chat template, or the template refuses the messages.
        """
        if not isinstance(self.template, str):
            raise ValueError("this model has no chat template: send a prompt instead of messages")
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                [messages], chat_template=self.template, add_generation_prompt=True, **self.specials
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        return self.backend.encode(rendered[0], add_special_tokens=False).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)


def text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
