"""Nothing is published when the last word to the group is older than the session timeout."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaError
from aiokafka.protocol.group import HeartbeatRequest, JoinGroupRequest, SyncGroupRequest
from aiokafka.protocol.produce import ProduceRequest

from plait.service import publisher as publisher_module
from plait.service.clock import Clock
from plait.service.membership import Membership
from plait.service.metrics import Metrics
from plait.service.publisher import Outbox, Publisher
from plait.service.settings import Settings
from service_bench import until


class Coordinator:
    """Answers with the next of `errors`, a little later than it was asked."""

    def __init__(self, now: list[float]) -> None:
        self.now, self.errors = now, [0]

    async def _send_req(self, request: Any) -> Any:
        self.now[0] += 0.5
        return SimpleNamespace(error_code=self.errors.pop(0))


@pytest.mark.parametrize(("error", "counts"), [(0, True), (27, True), (22, False), (25, False), (15, False)])
async def test_a_heartbeat_counts_from_when_it_was_sent(error: int, counts: bool) -> None:
    now = [0.0]
    membership, coordinator = Membership(Clock(monotonic=lambda: now[0]), 10), Coordinator(now)
    membership.listen(coordinator)
    assert membership.expired, "nobody has let us in yet"
    coordinator.errors = [error]
    await coordinator._send_req(HeartbeatRequest("g", 1, "m"))
    assert membership.expired is not counts
    now[0] = 9.99
    assert membership.expired is not counts
    now[0] = 10.0
    assert membership.expired


@pytest.mark.parametrize("error", [22, 25, 82])
async def test_thrown_out_is_at_once(error: int) -> None:
    now = [0.0]
    membership, coordinator = Membership(Clock(monotonic=lambda: now[0]), 10), Coordinator(now)
    membership.listen(coordinator)
    membership.settled(coordinator)
    assert not membership.expired
    coordinator.errors = [error]
    await coordinator._send_req(HeartbeatRequest("g", 1, "m"))
    assert membership.expired


async def test_a_new_member_is_none_before_it_has_dropped_what_it_lost() -> None:
    now = [0.0]
    membership, coordinator = Membership(Clock(monotonic=lambda: now[0]), 10), Coordinator(now)
    membership.listen(coordinator)
    await coordinator._send_req(SyncGroupRequest("g", 1, "m", None, []))
    assert membership.expired
    now[0] = 9.9
    membership.settled(coordinator)
    assert not membership.expired
    now[0] = 10.0
    assert membership.expired, "it counts from when the end of the rebalance was asked for"


async def test_asking_to_join_is_not_being_a_member() -> None:
    now = [0.0]
    membership, coordinator = Membership(Clock(monotonic=lambda: now[0]), 10), Coordinator(now)
    membership.listen(coordinator)
    await coordinator._send_req(JoinGroupRequest("g", 1, 1, "", None, "consumer", []))
    assert membership.expired


async def test_one_group_that_is_overdue_is_enough() -> None:
    now = [0.0]
    membership = Membership(Clock(monotonic=lambda: now[0]), 10)
    membership.heard("a", 0)
    membership.heard("b", 5)
    now[0] = 11
    assert membership.expired
    membership.leave("a")
    assert not membership.expired


class Client:
    """The network under the producer."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def add_topic(self, topic: str) -> None: ...

    async def send(self, node_id: Any, request: Any, **_: Any) -> None:
        self.sent.append(request)


class Producer:
    """Delivers each message in a batch of its own, once `go` is set: until then it waits in the producer."""

    made: list[Any] = []  # noqa: RUF012

    def __init__(self, **_: Any) -> None:
        self.client, self.go = Client(), asyncio.Event()
        self.go.set()
        self.tasks: list[asyncio.Task[None]] = []
        Producer.made.append(self)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def send(self, topic: str, value: bytes, **_: Any) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tasks.append(asyncio.create_task(self._deliver(topic, value, future)))
        return future

    async def _deliver(self, topic: str, value: bytes, future: asyncio.Future[None]) -> None:
        await self.go.wait()
        try:
            await self.client.send(0, ProduceRequest(None, -1, 1000, [(topic, [(0, value)])]))
            future.set_result(None)
        except KafkaError as error:
            future.set_exception(error)


async def member(monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], Membership, Outbox]:
    """A clock, a membership that was confirmed at 0 and lasts for 10 s, and an outbox that depends on it."""
    monkeypatch.setattr(publisher_module, "RETRY_BACKOFF_S", 0.001)
    Producer.made.clear()
    now = [0.0]
    membership = Membership(Clock(monotonic=lambda: now[0]), 10)
    membership.heard(None, 0)
    publisher = Publisher(Settings.load(), Metrics(), membership, Producer)
    await publisher.start()

    async def ensure() -> None: ...

    box = Outbox(publisher, Metrics(), "t", b"k", ensure)
    return now, membership, box


async def test_a_frozen_worker_publishes_nothing_when_it_thaws(monkeypatch: pytest.MonkeyPatch) -> None:
    now, membership, box = await member(monkeypatch)
    await box.put(b"0", [])
    await box.flush()
    (first,) = Producer.made
    assert len(first.client.sent) == 1
    first.go.clear()
    await box.put(b"1", [])  # handed over, and still in the producer when the worker freezes
    now[0] = 30
    first.go.set()
    late = asyncio.create_task(box.put(b"2", []))
    await until(lambda: len(Producer.made) == 2)
    await asyncio.sleep(0.01)
    assert len(first.client.sent) == 1 and not Producer.made[1].client.sent and not late.done()
    membership.heard(None, 30)  # it was no more than a pause: the requests are still ours
    await late
    await box.flush()
    assert len(Producer.made[1].client.sent) == 2 and box.delivered == 3


async def test_requests_that_were_lost_meanwhile_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now, membership, box = await member(monkeypatch)
    Producer.made[0].go.clear()
    await box.put(b"0", [])
    now[0] = 30
    late = asyncio.create_task(box.put(b"1", []))
    Producer.made[0].go.set()
    await asyncio.sleep(0.01)
    late.cancel()
    await asyncio.wait([late])
    box.discard()
    membership.heard(None, 30)
    await asyncio.gather(*Producer.made[0].tasks)
    assert not any(producer.client.sent for producer in Producer.made)
