"""Times the attention kernel with other tiles than `kernels/triton_config.py` chooses, and prints the best.

Run from the repository's root on a GPU; needs torch and triton. `python benchmarks/device_tune.py` takes about forty
seconds: every choice is compiled in a process of its own, all at once, and then timed alone out of Triton's cache.
"""

from __future__ import annotations

import subprocess
import sys
import time
from unittest.mock import patch

from device_kernels import link

link()

import torch  # noqa: E402  after the link
from device_speed import LLAMA, _batch, _call, _milliseconds  # noqa: E402

from plait.kernels import triton_attention, triton_config  # noqa: E402
from plait.kernels.triton_config import Cut, Launch  # noqa: E402

CASES = {
    "prefill llama-3-8b 1 x 8192": (LLAMA, [(8192, 8192)]),
    "decode llama-3-8b 8 x 4096": (LLAMA, [(1, 4096)] * 8),
    "decode llama-3-8b 64 x 2048": (LLAMA, [(1, 2048)] * 64),
    "decode llama-3-8b 256 x 1024": (LLAMA, [(1, 1024)] * 256),
}
# (rows of queries, keys of a step, warps, stages); the first is what the table has.
PREFILLS = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 8, 4)]
DECODES = [(16, 64, 4, 3), (16, 64, 4, 4), (16, 64, 8, 3), (16, 32, 4, 4), (16, 32, 2, 4), (16, 128, 4, 2)]


def choices(name: str) -> list[tuple[int, int, int, int]]:
    return PREFILLS if name.startswith("prefill") else DECODES


def pieces(name: str, tiles: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Programs a processor to try."""
    if name.startswith("prefill"):
        return (1,)
    if tiles == DECODES[0]:
        return (2, 3, 4, 6, 9, 12)
    return () if "256" in name else (3, 6)


def tuned(name: str, tiles: tuple[int, int, int, int], programs: int = 1):
    """A call of the attention with these tiles."""
    heads, chunks = CASES[name]
    batch, q = _batch(heads, chunks)
    launch = Launch(name.startswith("decode"), heads.dim, *tiles)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    cut = Cut(max(1, programs * processors // heads.kv), -(-triton_config.LEAST_KEYS // tiles[1]))
    call = _call(heads, batch, q, {})

    def run() -> None:
        with (
            patch.object(triton_attention, "launch_for", lambda *_, **__: launch),
            patch.object(triton_attention, "cut_for", lambda *_: cut),
        ):
            call()

    return run


def main() -> int:
    if len(sys.argv) > 1:
        name, *tiles = sys.argv[1:]
        tuned(name, tuple(map(int, tiles)))()
        torch.cuda.synchronize()
        return 0
    began = time.monotonic()
    # One case of each kind: other cases use the same compiled kernels.
    wanted = [(name, tiles) for name in list(CASES)[:2] for tiles in choices(name)]
    failed = compile_all(wanted)
    print(f"{len(wanted)} compiled in {time.monotonic() - began:.0f} s", flush=True)
    for name in CASES:
        decodes = name.startswith("decode")
        rows = []
        for tiles in choices(name):
            if (name, tiles) in failed:
                continue
            for programs in pieces(name, tiles):
                try:
                    rows.append((_milliseconds(tuned(name, tiles, programs)) * 1e3, tiles, programs))
                except Exception as error:
                    print(f"{name} {tiles}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        rows.sort()
        print(name)
        for spent, tiles, programs in rows[:5]:
            print(
                f"  {spent:8.1f} us with {tiles}{f', {programs} programs a processor' * decodes}", flush=True
            )
    print(f"{time.monotonic() - began:.0f} s")
    return 0


def compile_all(
    wanted: list[tuple[str, tuple[int, ...]]], at_once: int = 15
) -> set[tuple[str, tuple[int, ...]]]:
    """Each in a process of its own; gives those that failed."""
    failed: set[tuple[str, tuple[int, ...]]] = set()
    waiting, running = list(wanted), []
    while waiting or running:
        while waiting and len(running) < at_once:
            name, tiles = waiting.pop()
            command = [sys.executable, __file__, name, *map(str, tiles)]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            running.append(((name, tiles), subprocess.Popen(command, **quiet)))
        time.sleep(0.05)
        failed |= {choice for choice, process in running if process.poll()}
        running = [(choice, process) for choice, process in running if process.poll() is None]
    return failed


if __name__ == "__main__":
    sys.exit(main())
