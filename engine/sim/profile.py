"""Devices to simulate: small TOML files beside this module, and others of that form.

An iteration takes `fixed` seconds, and for each token of a prompt `prefill_token`, for each sequence that decodes
`decode`, for each token of context that a decode reads `kv_token`, for each pair of a prompt's token and one before
it, or itself, `pair`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from plait.engine.config import EngineConfig
from plait.engine.sequence import Chunk

FOLDER = Path(__file__).parent
SHIPPED = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


class ProfileError(ValueError):
    """A profile that cannot be used; the message names the file and the key."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """Seconds. `noise` is the standard deviation of an iteration's time, as a share of it."""

    fixed: float
    prefill_token: float
    decode: float
    kv_token: float
    pair: float
    noise: float = 0.0

    def seconds(self, chunks: Iterable[Chunk]) -> float:
        prefilled, decodes, read, pairs = work(chunks)
        return (
            self.fixed
            + self.prefill_token * prefilled
            + self.decode * decodes
            + self.kv_token * read
            + self.pair * pairs
        )


def work(chunks: Iterable[Chunk]) -> tuple[int, int, int, int]:
    """What an iteration computes: tokens of prompts, decodes, KV tokens that these read, pairs."""
    prefilled = decodes = read = pairs = 0
    for chunk in chunks:
        count, context = chunk.count, chunk.seq.computed
        if count == 1:
            decodes += 1
            read += context + 1
        else:
            prefilled += count
            pairs += count * (2 * context + count + 1) // 2
    return prefilled, decodes, read, pairs


@dataclass(frozen=True, slots=True)
class Profile:
    """A model on a device. `engine` holds settings that a worker there would be given; the rest are the defaults."""

    name: str
    device: str
    num_blocks: int
    block_bytes: int
    copy_bytes_per_s: float
    """Between the device's memory and the host's."""
    max_model_len: int
    vocab_size: int
    iteration: Iteration
    engine: dict[str, Any]

    @property
    def max_tokens_total(self) -> int:
        """Tokens of the longest sequence: the smaller of the model's length and of the pool."""
        return min(self.max_model_len, self.num_blocks * self.config().block_size)

    def config(self, **changes: Any) -> EngineConfig:
        return EngineConfig(**{**self.engine, **changes})


def load(name: str) -> Profile:
    """A shipped profile by its name, or a file's. Raises ProfileError."""
    path = FOLDER / f"{name}.toml" if name in SHIPPED else Path(name)
    try:
        with path.open("rb") as file:
            data = tomllib.load(file)
    except OSError:
        raise ProfileError(f"{name}: no such profile; there are {', '.join(SHIPPED)}, and files") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: is not TOML: {error}") from None
    try:
        iteration = _take(Iteration, data.pop("iteration", {}), path, "iteration.")
        engine = data.pop("engine", {})
        profile = _take(Profile, {**data, "iteration": iteration, "engine": engine, "name": path.stem}, path)
        profile.config()
    except TypeError as error:
        raise ProfileError(f"{path}: {error}") from None
    except ValueError as error:
        raise ProfileError(str(error) if isinstance(error, ProfileError) else f"{path}: {error}") from None
    return profile


def _take(kind: Any, data: dict[str, Any], path: Path, prefix: str = "") -> Any:
    known = {field.name: field for field in fields(kind)}
    for key in data:
        if key not in known:
            raise ProfileError(f"{path}: {prefix}{key}: unknown key")
    for key, value in data.items():
        if known[key].type in ("int", "float"):
            whole = known[key].type == "int"
            right = isinstance(value, int) if whole else isinstance(value, int | float)
            if isinstance(value, bool) or not right or value < 0 or (whole and value == 0):
                raise ProfileError(f"{path}: {prefix}{key}: {value!r} is not a positive number")
    for key, field in known.items():
        if key not in data and field.default is MISSING:
            raise ProfileError(f"{path}: {prefix}{key}: is missing")
    return kind(**data)
