"""A virtual environment for each peer, made on demand by pip from pins, in plait's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from plait.engine.models import last_line
from plait.kernels.build import cache_dir

# Prints what a distribution requires, less the packages named after it.
REQUIRES = """
import re, sys
from importlib.metadata import requires
for line in requires(sys.argv[1]):
    if "extra ==" not in line and re.match(r"[\\w.-]+", line)[0] not in sys.argv[2:]:
        print(line)
"""


class NotInstalled(RuntimeError):
    """A peer cannot be installed here; the message says why."""


@dataclass(frozen=True)
class Environment:
    """`requirements` are pinned. `variables` are for builds.

    `bare` is a distribution that comes without its own requirements: these are installed less those in
    `without`, which `requirements` replaces or the peer does not need.
    """

    name: str
    requirements: tuple[str, ...]
    bare: str = ""
    without: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return cache_dir() / "peers" / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def make(self) -> None:
        """Make it, unless it is there with these pins. Raises NotInstalled."""
        stamp = self.folder / "pins.txt"
        pins = "\n".join((*self.requirements, self.bare, *self.without, *map(str, self.variables.items())))
        if stamp.is_file() and stamp.read_text() == pins:
            return
        print(f"installing {self.name}, once, into the cache", file=sys.stderr, flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        requirements = list(self.requirements)
        if self.bare:
            self.pip("--no-deps", self.bare)
            name = self.bare.partition("==")[0]
            command = [str(self.python), "-c", REQUIRES, name, *self.without]
            requirements += subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
                "\n"
            )
        self.pip(*filter(None, requirements))
        stamp.write_text(pins)

    def pip(self, *arguments: str) -> None:
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, "--no-input", *arguments],
            env={**os.environ, **self.variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            raise NotInstalled((errors or [last_line(done.stderr)])[0].strip())
