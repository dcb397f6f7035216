"""The control topic is read to its end, whatever is in it."""

import asyncio
from typing import Any

from aiokafka import TopicPartition
from aiokafka.structs import ConsumerRecord

from plait.schemas import Cancel, encode
from plait.service.control import Control
from plait.service.metrics import Metrics
from plait.service.settings import Settings
from service_bench import until

P0 = TopicPartition("plait.control", 0)
POISON = object()  # stands for a record that cannot be decoded


class FakeConsumer:
    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.at = 0
        self.stopped = False

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.stopped = True

    def assignment(self) -> set[TopicPartition]:
        return {P0}

    def paused(self) -> set[TopicPartition]:
        return set()

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self.at = offset

    async def seek_to_end(self, tp: TopicPartition) -> None:
        self.at = len(self.log)

    async def position(self, tp: TopicPartition) -> int:
        return self.at

    async def getmany(
        self, *only: TopicPartition, timeout_ms: int, max_records: int = 500
    ) -> dict[TopicPartition, list[Any]]:
        await asyncio.sleep(0.001)
        found = self.log[self.at : self.at + max_records]
        if POISON in found:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        self.at += len(found)
        return {P0: found} if found else {}


def cancel(offset: int, request_id: str) -> ConsumerRecord[Any, Any]:
    value = encode(Cancel(request_id=request_id))
    return ConsumerRecord(P0.topic, 0, offset, 0, 0, None, value, None, 0, len(value), ())


async def test_a_record_that_cannot_be_decoded_is_stepped_over() -> None:
    log: list[Any] = []
    heard: list[str] = []
    control = Control(Settings.load(), Metrics(), heard.append, lambda *_, **__: FakeConsumer(log))
    task = asyncio.create_task(control.run())
    try:
        await control.ready.wait()
        log += [cancel(0, "a"), POISON, cancel(2, "b")]
        await until(lambda: heard == ["a", "b"])
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])
        await control.close()
