"""What the engine reports comes out of /metrics."""

from prometheus_client import generate_latest

from fakes import FakeEngine
from plait.engine.api import EngineStats
from plait.service.metrics import Metrics


async def test_refusals_and_the_error_of_forecasts_are_exported():
    engine = FakeEngine()
    engine.stats = EngineStats(refused={"slo.ttft_ms": 3, "max_waiting": 1}, forecast_error=0.25)
    metrics = Metrics()
    metrics.watch(engine)
    text = generate_latest(metrics.registry).decode()
    assert 'plait_engine_refused_total{reason="slo.ttft_ms"} 3.0' in text
    assert 'plait_engine_refused_total{reason="max_waiting"} 1.0' in text
    assert "plait_engine_forecast_error_seconds 0.25" in text
