"""kill -9 in the middle of many streams, a worker that is frozen, a rolling restart: on a real Kafka."""

from pathlib import Path

import pytest

import kill_rounds
from kafka_broker import KafkaBroker

pytestmark = pytest.mark.kafka


async def test_rounds_of_kills(kafka: KafkaBroker, tmp_path: Path) -> None:
    """As many as begin within half a minute; benchmarks/kill_rounds.py does twenty."""
    result = await kill_rounds.run(kafka.bootstrap_servers, tmp_path, rounds=20, seconds=30)
    assert result.rounds >= 2
    assert (result.missing, result.duplicated, result.unanswered, result.different) == (0, 0, 0, 0)
    assert result.second_ends == 0 and result.repeated == 0, "read back, not run again"
    assert result.midstream >= 0.9 * result.requests
