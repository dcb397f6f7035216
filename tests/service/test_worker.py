"""Starting and stopping, without a broker."""

import asyncio

import aiohttp
import pytest

from fakes import FakeEngine
from plait.service.settings import Settings
from plait.service.worker import Worker, WorkerFailed

NOWHERE = {"bootstrap_servers": "127.0.0.1:1", "connect_timeout_s": 0.2}


async def test_no_broker_is_a_clear_failure() -> None:
    worker = Worker(Settings.load(kafka=NOWHERE, http={"port": 0}), FakeEngine())
    with pytest.raises(WorkerFailed, match=r"no connection to Kafka at 127\.0\.0\.1:1"):
        await worker.run()


async def test_waiting_for_a_broker_is_not_said_at_every_try(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("plait.service.worker.CONNECT_BACKOFF_S", 0.01)
    with pytest.raises(WorkerFailed):
        await Worker(Settings.load(kafka=NOWHERE, http={"port": 0}), FakeEngine()).run()
    assert sum("waiting for Kafka" in message for message in caplog.messages) == 1


async def test_an_engine_that_does_not_start_is_a_clear_failure() -> None:
    class Broken(FakeEngine):
        async def start(self) -> None:
            raise RuntimeError("the model is refused")

    worker = Worker(
        Settings.load(kafka=NOWHERE | {"connect_timeout_s": 60}, http={"port": 0}), Broken(ready=False)
    )
    with pytest.raises(RuntimeError, match="the model is refused"):
        await worker.run()


async def test_stopped_while_starting() -> None:
    engine = FakeEngine(ready=False)
    loading = asyncio.Event()

    async def load_forever() -> None:
        loading.set()
        await asyncio.Event().wait()

    engine.start = load_forever  # type: ignore[method-assign]
    settings = Settings.load(kafka=NOWHERE | {"connect_timeout_s": 60}, http={"port": 0})
    worker = Worker(settings, engine)
    task = asyncio.create_task(worker.run())
    await loading.wait()
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{worker.http.port}/startupz") as response,
    ):
        assert response.status == 503 and await response.text() == "starting"
    worker.stop()
    async with asyncio.timeout(20):
        await task
    assert not worker.ready.is_set()


async def test_a_taken_port_is_a_clear_failure() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    worker = Worker(Settings.load(kafka=NOWHERE, http={"port": port}), FakeEngine())
    with pytest.raises(OSError, match=str(port)):
        await worker.run()
    server.close()
