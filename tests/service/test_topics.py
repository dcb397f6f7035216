"""Topics are made in batches, and removed, with an admin client under the test's control."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import InvalidReplicationFactorError, NotControllerError, for_code

from plait.service import topics as topics_module
from plait.service.clock import Clock
from plait.service.membership import Membership
from plait.service.metrics import Metrics
from plait.service.publisher import MAX_REQUEST_BYTES, Publisher
from plait.service.settings import Settings
from plait.service.sweeper import Sweeper
from plait.service.topics import Topics, TopicUnavailable, create_own


class FakeAdmin:
    """Answers with `errors` (codes, by topic) or raises what is in `failures` first."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.removed: list[str] = []
        self.errors: dict[str, int] = {}
        self.failures: list[Exception] = []
        self.default_replication = True

    async def create_topics(self, wanted: list[Any]) -> Any:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        if not self.default_replication and any(t.replication_factor < 0 for t in wanted):
            bad = InvalidReplicationFactorError.errno
            return SimpleNamespace(topic_errors=[(t.name, bad, "no default") for t in wanted])
        self.made += wanted
        return SimpleNamespace(topic_errors=[(t.name, self.errors.get(t.name, 0), "") for t in wanted])

    async def delete_topics(self, topics: list[str]) -> Any:
        self.removed += topics
        return SimpleNamespace(topic_error_codes=[(topic, 0) for topic in topics])

    async def _send_request(self, request: Any) -> Any:
        found = [{"topic": topic, "error_code": 3} for topic in request._topics]
        return SimpleNamespace(to_object=lambda: {"topics": found})


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch) -> Topics:
    monkeypatch.setattr(topics_module, "RETRY_BACKOFF_S", 0.001)
    made = Topics(Settings.load(), Metrics())
    made.admin = FakeAdmin()
    return made


async def test_a_topic_that_is_not_there_yet_holds_up_no_other(topics: Topics) -> None:
    topics.admin.errors = {"plait.responses.slow": NotControllerError.errno}
    slow = asyncio.create_task(topics.prepare("plait.responses.slow"))
    async with asyncio.timeout(10):
        await topics.prepare("plait.responses.quick")
        assert not slow.done()
        topics.admin.errors = {}
        await slow


async def test_a_fault_of_our_own_leaves_nobody_waiting(topics: Topics) -> None:
    topics.admin.failures = [RuntimeError("bug")]
    async with asyncio.timeout(10):
        with pytest.raises(TopicUnavailable, match="bug"):
            await topics.prepare("plait.responses.a")
        await topics.prepare("plait.responses.a")


@pytest.mark.parametrize(("default", "replication"), [(True, -1), (False, 1)])
async def test_own_topics_take_the_default_replication_and_large_dead_letters(
    default: bool, replication: int
) -> None:
    admin = FakeAdmin()
    admin.default_replication = default
    admin.errors = {"plait.control": 36}
    assert for_code(36).__name__ == "TopicAlreadyExistsError"
    assert await create_own(admin, Settings.load().topics) == ["plait.requests", "plait.dlq"]
    assert {topic.replication_factor for topic in admin.made} == {replication}
    (dlq,) = [topic for topic in admin.made if topic.name == "plait.dlq"]
    assert dlq.topic_configs == {"max.message.bytes": str(MAX_REQUEST_BYTES)}


async def test_expired_topics_are_removed_and_forgotten_but_not_those_in_use(topics: Topics) -> None:
    settings, now = Settings.load(topics={"response_ttl_s": 10}), [0.0]
    publisher = Publisher(settings, Metrics(), Membership(Clock(), 10))
    parts = [TopicPartition(f"plait.responses.{name}", 0) for name in "abc"]
    sequences = dict.fromkeys(parts, 7)
    publisher._producer = SimpleNamespace(_txn_manager=SimpleNamespace(_sequence_numbers=sequences))
    sweeper = Sweeper(settings, topics, Metrics(), Clock(monotonic=lambda: now[0]), publisher)
    for part in parts:
        sweeper.schedule(part.topic)
    publisher.retain(parts[1].topic)
    now[0] = 9
    await sweeper._remove_expired()
    assert topics.admin.removed == []
    now[0] = 10
    await sweeper._remove_expired()
    assert topics.admin.removed == [parts[0].topic, parts[2].topic]
    assert sequences == {parts[1]: 7}
