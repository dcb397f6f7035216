"""Checks the Triton kernels on a GPU against the reference and measures them beside the device's limits.

Run from the repository's root; needs torch and triton. `python benchmarks/device_kernels.py` takes two to
three minutes, prints tables and writes device_kernels.json to the folder OUT, or to benchmarks/results.
`--interpret` runs the checks alone, small, on the CPU; `--only PATTERN` checks (in bf16) and measures what has the
regular expression in its name, and writes nothing. Exit code 1 when a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path.cwd()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--interpret", action="store_true", help="small checks in Triton's interpreter, no GPU"
    )
    parser.add_argument("--checks-only", action="store_true", help="no measurements")
    parser.add_argument("--only", default="", help="what has this regular expression in its name")
    arguments = parser.parse_args()
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    link()

    import torch
    from device_checks import run_checks

    if not arguments.interpret and not torch.cuda.is_available():
        print("no CUDA device; --interpret runs the checks without one", file=sys.stderr)
        return 2
    device = "cpu" if arguments.interpret else "cuda"
    began = time.monotonic()
    report: dict = {
        "torch": torch.__version__,
        "device": device,
        "checks": run_checks(device, arguments.only),
    }
    failed = [check for check in report["checks"] if not check["ok"]]
    print(
        f"{len(report['checks'])} checks, {len(failed)} failed, {time.monotonic() - began:.1f} s", flush=True
    )
    if device == "cuda":
        report["device"] = torch.cuda.get_device_name()
        if not arguments.checks_only:
            from device_speed import measure

            report |= measure(arguments.only)
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    out.mkdir(parents=True, exist_ok=True)
    if not arguments.only and (device == "cuda" or "OUT" in os.environ):
        (out / "device_kernels.json").write_text(json.dumps(report, indent=1))
    return 1 if failed else 0


def link() -> None:
    """Make `plait` and the tests' helpers importable without an installation."""
    package = ROOT / "build" / "link" / "plait"
    package.mkdir(parents=True, exist_ok=True)
    for room in ("engine", "kernels", "schemas", "service"):
        link = package / room
        if not link.exists():
            link.symlink_to(ROOT / room)
    sys.path[:0] = [str(package.parent), str(ROOT / "tests"), str(ROOT / "tests" / "kernels")]


if __name__ == "__main__":
    sys.exit(main())
