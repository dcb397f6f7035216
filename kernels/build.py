"""Compiles the C++ kernels once for this processor and keeps the library in the cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = sorted(Path(__file__).parent.glob("cpu_*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("cpu_*.h"))
FLAGS = [
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fPIC",
    "-shared",
    "-fopenmp",
]


def cache_dir() -> Path:
    """Where plait keeps what it can make again: `PLAIT_CACHE`, else `plait` in the user's cache folder."""
    if configured := os.environ.get("PLAIT_CACHE"):
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "plait"


def compiler() -> str | None:
    """The C++ compiler: `CXX`, else the first of g++, clang++, c++ on the path; None without one."""
    return next((c for c in (os.environ.get("CXX"), "g++", "clang++", "c++") if c and shutil.which(c)), None)


def processor() -> str:
    """What -march=native depends on, so that a cache on a shared disk is not used by another processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(
            sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
        )
    except OSError:
        return platform.processor()


def load() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there is no compiler. Raises RuntimeError when compiling fails.

    Import torch first: the library is linked to OpenMP by soname and then shares torch's runtime and threads.
    """
    cxx = compiler()
    if cxx is None:
        return None
    text = [file.read_text() for file in (*SOURCES, *HEADERS)]
    key = hashlib.sha256("\0".join([*text, cxx, *FLAGS, processor()]).encode()).hexdigest()[:16]
    library = cache_dir() / "kernels" / f"cpu-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as tmp:
            made = Path(tmp) / library.name
            run = subprocess.run(
                [cxx, *FLAGS, *map(str, SOURCES), "-o", str(made)], capture_output=True, text=True
            )
            if run.returncode:
                raise RuntimeError(f"{cxx} could not compile the CPU kernels:\n{run.stderr[-2000:]}")
            made.replace(library)
    return ctypes.CDLL(str(library))
