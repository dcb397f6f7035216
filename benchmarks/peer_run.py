"""One run of one peer: started in a process of its own, watched, and its report turned into numbers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from benchmarks.peer_job import Job
from benchmarks.peer_list import Peer

ROOT = Path(__file__).parent.parent
TIMEOUT_SECONDS = 1800
# The last ones are for libraries that would otherwise fill the log or look for the network.
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1", "DO_NOT_TRACK": "1"}


class PeerFailed(RuntimeError):
    """A peer ended with an error, or did not do what it was asked; the message says what."""


class Memory(threading.Thread):
    """The largest sum of the memory of a process and all below it, looked at twice a second, in MiB.

    What is shared, mostly libraries, counts once: as in the process that has most of it. (The kernel's exact
    proportional set size takes 35 ms to read for a process of 1.5 GB, too much beside a measurement.)
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root = psutil.Process(pid)
        self.peak = 0.0
        self.seen: set[psutil.Process] = set()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.5):
            self.peak = max(self.peak, self.now())

    def now(self) -> float:
        own, shared = 0, [0]
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self.root, *self.root.children(recursive=True)):
                self.seen.add(process)
                with contextlib.suppress(psutil.Error):
                    memory = process.memory_info()
                    shared.append(getattr(memory, "shared", 0))
                    own += memory.rss - shared[-1]
        return (own + max(shared)) / 2**20

    def end(self) -> None:
        """Stop looking, and end what is still there."""
        self.over.set()
        self.join()
        for process in self.seen:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(self.seen, timeout=10)


def run(peer: Peer, job: Job) -> dict[str, Any]:
    """The last line that the peer printed, as JSON, with its `peak_mib`. Raises PeerFailed."""
    command = [peer.python, "-m", f"benchmarks.{peer.module}", *peer.arguments]
    # What the caller has set wins, so that other settings of a peer can be tried.
    environment = {**QUIET, **peer.variables, **os.environ}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        memory = Memory(process.pid)
        memory.start()
        try:
            out, _ = process.communicate(json.dumps(asdict(job)).encode(), timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise PeerFailed(f"still busy after {TIMEOUT_SECONDS} s") from None
        finally:
            memory.end()
        lines = [line for line in out.splitlines() if line.startswith(b"{")]
        if process.returncode or not lines:
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines()
            errors = [line for line in said if re.match(r"[\w.]*(Error|Exception|Failed)\b", line)]
            reason = (errors or said or ["it said nothing"])[-1]
            raise PeerFailed(f"exit code {process.returncode}: {reason}")
    return {**json.loads(lines[-1]), "peak_mib": round(memory.peak)}


def numbers(job: Job, report: dict[str, Any]) -> dict[str, Any]:
    """Rates and latencies of a report. Raises PeerFailed when a request got more or fewer tokens than asked."""
    answers = report["answers"]
    for r in job.requests:
        if answers[r.id]["tokens"] != r.output_tokens:
            raise PeerFailed(f"request {r.id} got {answers[r.id]['tokens']} of {r.output_tokens} tokens")
    rows = [answers[r.id] for r in job.requests]
    seconds = max(a["last"] for a in rows) - min(a["submitted"] for a in rows)
    latencies = sorted(a["last"] - a["submitted"] for a in rows)
    firsts = [a["first"] - a["submitted"] for a in rows]
    gaps = [(a["last"] - a["first"]) / (a["tokens"] - 1) for a in rows if a["tokens"] > 1]
    tokens = sum(r.output_tokens for r in job.requests)
    return {
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "mean_first_token_s": sum(firsts) / len(firsts),
        "mean_latency_s": sum(latencies) / len(latencies),
        "p99_latency_s": latencies[math.ceil(0.99 * len(latencies)) - 1],
        "ms_per_token": 1000 * sum(gaps) / len(gaps) if any(gaps) else 1000 * seconds / tokens,
        "peak_mib": report["peak_mib"],
        "first_tokens": [a["first_token"] for a in rows],
        "version": report["version"],
        "time": report["time"],
    }
