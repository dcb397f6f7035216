"""What all tests share: the environment of torch and transformers, and the two brokers."""

import os

# Before torch is imported: idle threads sleep rather than spin, so that several test runs share a machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kafka_broker import kafka, kafka_cluster, own_kafka
from plait.service.embedded import EmbeddedBroker

__all__ = ["embedded_broker", "kafka", "kafka_cluster", "own_kafka"]


@pytest.fixture(scope="session")
def embedded_broker() -> Iterator[EmbeddedBroker]:
    """One embedded broker for the whole session, in an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="embedded-broker")
    thread.start()
    broker = EmbeddedBroker()
    try:
        asyncio.run_coroutine_threadsafe(broker.__aenter__(), loop).result(30)
        yield broker
    finally:
        asyncio.run_coroutine_threadsafe(broker.__aexit__(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
