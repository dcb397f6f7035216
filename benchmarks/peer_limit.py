"""The ideal time of the job on stdin on this machine, in bf16, from rates measured now."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from benchmarks import limit
from benchmarks.peer_job import read_job
from benchmarks.workload import Item


def main() -> None:
    job = read_job()
    items = [Item(r.id, r.prompt, r.output_tokens) for r in job.requests]
    machine = limit.measure(torch.bfloat16)
    shape = limit.shape(Path(job.model), torch.bfloat16)
    ideal = limit.ideal_seconds(items, job.seats if job.together else 1, shape, machine)
    print(json.dumps({"seconds": ideal, "bytes_per_s": machine.bytes_per_s, "flops": machine.flops}))


if __name__ == "__main__":
    main()
