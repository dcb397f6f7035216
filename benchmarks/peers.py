"""`make bench-peers`: plait beside other engines on one workload, in turn, and beside the machine's limit.

Each engine runs in a process and, unless it is plait or transformers, in a virtual environment of its own, made on
first use. The last line is one JSON object with the medians of tokens per second; null is an engine that could not
be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import sys
from pathlib import Path

from benchmarks.peer_env import NotInstalled
from benchmarks.peer_job import Job, Request
from benchmarks.peer_list import LIMIT, PEERS, Peer
from benchmarks.peer_models import model_path
from benchmarks.peer_report import medians, plot, print_table, print_where_time_goes
from benchmarks.peer_run import PeerFailed, numbers, run
from benchmarks.workload import Item, load

RESULTS = Path(__file__).with_name("results")
SINGLE_REQUESTS, SINGLE_TOKENS = 4, 128
LONG_REQUESTS, LONG_TOKENS, LONG_PROMPT = 8, 32, (1000, 4000)
SEED = 64


def long_prompts(items: list[Item]) -> list[Request]:
    """Prompts of 1,000 to 4,000 tokens: the workload's prompts, put together in a seeded order for each."""
    rng, requests = random.Random(SEED), []
    for number in range(LONG_REQUESTS):
        order = rng.sample(items, len(items))
        text = [token for item in order for token in item.prompt]
        requests.append(Request(f"long-{number}", text[: rng.randint(*LONG_PROMPT)], LONG_TOKENS))
    return requests


def requests_of(args: argparse.Namespace) -> tuple[list[Request], str]:
    """The requests of this benchmark, and its title."""
    items = load()
    if args.long:
        requests = long_prompts(items)[: args.first]
        return requests, f"{len(requests)} prompts of 1,000 to 4,000 tokens, {LONG_TOKENS} tokens each"
    if args.batch1:
        count = args.first or SINGLE_REQUESTS
        requests = [Request(i.id, i.prompt, SINGLE_TOKENS) for i in items[:count]]
        return requests, f"{count} requests one after another, {SINGLE_TOKENS} tokens each"
    requests = [Request(i.id, i.prompt, i.output_tokens) for i in items[: args.first]]
    tokens = sum(r.output_tokens for r in requests)
    return requests, f"{len(requests)} requests at once, {tokens} tokens in all"


def job_for(peer: Peer, requests: list[Request], together: bool) -> Job:
    return Job(requests, together, peer.seats, str(model_path(peer.form)), peer.program)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[p.name for p in PEERS])
    parser.add_argument("--first", type=int, metavar="N", help="only so many requests")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--batch1", action="store_true", help="one request at a time")
    kind.add_argument("--long", action="store_true", help="long prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all numbers go")
    return parser.parse_args()


def main() -> None:
    # So that an engine that runs is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = arguments()
    requests, title = requests_of(args)
    together = not args.batch1
    chosen = [p for p in PEERS if args.only is None or p.name in args.only]
    failures: dict[str, str] = {}
    # All installing comes first: a build would disturb what is measured.
    for peer in chosen:
        try:
            if peer.environment:
                peer.environment.make()
        except NotInstalled as error:
            failures[peer.name] = f"it does not install: {error}"
    load_before = os.getloadavg()[0]
    if load_before > 0.5:
        print(f"this machine is busy (load {load_before:.1f}): the numbers will be too low", file=sys.stderr)

    results: dict[str, list[dict]] = {p.name: [] for p in chosen}
    rates = []
    for number in range(args.runs):
        rates.append(run(LIMIT, job_for(LIMIT, requests, together)))
        for peer in chosen:
            if peer.name in failures:
                continue
            job = job_for(peer, requests, together)
            try:
                results[peer.name].append(numbers(job, run(peer, job)))
            except PeerFailed as error:
                failures[peer.name] = str(error)
                results[peer.name].clear()
                continue
            speed = results[peer.name][-1]["tokens_per_s"]
            print(f"run {number + 1}: {peer.name}: {speed:.1f} tokens/s", file=sys.stderr, flush=True)

    tokens = sum(r.output_tokens for r in requests)
    limit = tokens / statistics.median(r["seconds"] for r in rates)
    title += f", bf16, medians of {args.runs}"
    print_table(title, results, failures, limit)
    print_where_time_goes(results.get("plait", []))
    speeds = {name: round(medians(r)["tokens_per_s"], 1) if r else None for name, r in results.items()}
    file = args.json or RESULTS / f"peers{'-batch1' if args.batch1 else '-long' if args.long else ''}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    written = {
        "title": title,
        "machine": {"processors": len(os.sched_getaffinity(0)), "system": platform.machine()},
        "load_before": load_before,
        "pins": {p.name: [*p.environment.requirements, p.environment.bare] for p in chosen if p.environment},
        "limit": [{"tokens_per_s": tokens / r["seconds"], **r} for r in rates],
        "medians": {name: medians(runs) for name, runs in results.items() if runs},
        "runs": results,
        "not_measured": failures,
    }
    file.write_text(json.dumps(written, indent=1))
    if any(results.values()):
        plot(title, results, limit, file.with_suffix(".png"))
    print(json.dumps({**speeds, "limit": round(limit, 1)}))


if __name__ == "__main__":
    main()
