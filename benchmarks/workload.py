"""The workload of the CPU benchmarks: 64 fixed prompts (5,364 tokens), and how many tokens follow each (5,545)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("workload_64.json")


@dataclass(frozen=True, slots=True)
class Item:
    id: str
    prompt: list[int]
    output_tokens: int


def load(first: int | None = None) -> list[Item]:
    rows = json.loads(FILE.read_text())[:first]
    return [Item(str(r["id"]), r["prompt_token_ids"], r["output_tokens"]) for r in rows]
