"""Rounds of kill -9 on Apache Kafka: `python -m benchmarks.kill_rounds --rounds 20`; prints counts, last as JSON.

In each round the worker that holds the partitions is killed in the middle of 50 streams, and another one goes on; with
`--model smollm2` in the middle of 20, which are compared with those of an engine of that model that nobody kills. The
machinery is that of tests/integration/test_kills.py (tests/kill_rounds.py), which needs Java 17 and Maven.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main() -> int:
    import kill_rounds
    from kafka_broker import KafkaBroker
    from kill_loads import FakeLoad, ModelLoad

    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--delivery", choices=["idempotent", "transactional"], default="idempotent")
    parser.add_argument("--model", help="a real one, in float32; without, the tests' fake engine")
    asked = parser.parse_args()
    load = ModelLoad(asked.model) if asked.model else FakeLoad()
    with tempfile.TemporaryDirectory(prefix="plait-kills-") as folder:
        broker = KafkaBroker(Path(folder) / "kafka")
        try:
            broker.start()
            result = asyncio.run(
                kill_rounds.run(
                    broker.bootstrap_servers,
                    Path(folder),
                    asked.rounds,
                    delivery=asked.delivery,
                    say=print,
                    load=load,
                )
            )
        finally:
            broker.kill()
    took = result.takeover_s
    figures = asdict(result) | {"delivery": asked.delivery, "takeover_median_s": statistics.median(took)}
    if asked.model:
        figures["model"] = asked.model
    del figures["takeover_s"]
    print(
        f"from the kill to the next worker's first event: median {statistics.median(took):.2f} s, longest"
        f" {max(took):.2f} s (session timeout {load.session_ms / 1000:g} s, and the start of a process)"
    )
    print(json.dumps(figures))
    bad = result.missing, result.duplicated, result.unanswered, result.different
    return int(any(bad))


if __name__ == "__main__":
    sys.exit(main())
