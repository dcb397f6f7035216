"""The embedded broker: it must be Kafka enough for plait, and cheap when idle."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import confluent_kafka
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import CommitFailedError

from plait.service import embedded
from plait.service.embedded import EmbeddedBroker, EmbeddedBrokerFailed

CONSUME_UNTIL_KILLED = """
import asyncio, sys
from aiokafka import AIOKafkaConsumer
async def main():
    consumer = AIOKafkaConsumer("t", bootstrap_servers=sys.argv[1], group_id="g", session_timeout_ms=6000,
                                heartbeat_interval_ms=500)
    await consumer.start()
    while not consumer.assignment():
        await asyncio.sleep(0.05)
    print("joined", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""

HOLD_A_BROKER = """
import asyncio
from plait.service.embedded import EmbeddedBroker
async def main():
    async with EmbeddedBroker() as broker:
        print(broker._process.pid, broker.data_dir, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
async def broker() -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture
async def admin(broker: EmbeddedBroker) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await admin.start()
    yield admin
    await admin.close()


@asynccontextmanager
async def running(client: AIOKafkaConsumer | AIOKafkaProducer) -> AsyncIterator:
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


def producing(broker: EmbeddedBroker):
    return running(
        AIOKafkaProducer(bootstrap_servers=broker.bootstrap_servers, acks="all", enable_idempotence=True)
    )


def consuming(broker: EmbeddedBroker, *topics: str, **options):
    options = {"auto_offset_reset": "earliest", "enable_auto_commit": False, **options}
    return running(AIOKafkaConsumer(*topics, bootstrap_servers=broker.bootstrap_servers, **options))


async def test_an_idempotent_producer_s_records_arrive_in_order(broker, admin) -> None:
    await admin.create_topics([NewTopic("t", 1, 1)])
    async with producing(broker) as producer, consuming(broker, "t", group_id="g") as consumer:
        for i in range(500):
            await producer.send("t", b"%d" % i)
        await producer.flush()
        assert [int((await consumer.getone()).value) for _ in range(500)] == list(range(500))


async def test_the_metadata_of_a_commit_is_kept(broker, admin) -> None:
    await admin.create_topics([NewTopic("t", 1, 1)])
    partition = TopicPartition("t", 0)
    async with consuming(broker, "t", group_id="g") as consumer:
        await consumer.commit({partition: (0, "above the prefix: 3-5")})
    offsets = await admin.list_consumer_group_offsets("g")
    assert offsets[partition].metadata == "above the prefix: 3-5"


async def test_a_removed_topic_does_not_come_back_when_a_consumer_asks_about_it(broker, admin) -> None:
    await admin.create_topics([NewTopic("t", 1, 1)])
    assert "t" in await admin.list_topics()
    async with consuming(broker, "t") as consumer:
        await admin.delete_topics(["t"])
        await consumer._client.force_metadata_update()
        assert "t" not in await admin.list_topics()


async def test_an_idle_consumer_does_not_spin(broker, admin) -> None:
    await admin.create_topics([NewTopic("t", 1, 1)])
    async with consuming(broker, "t", fetch_max_wait_ms=250):
        before = broker.fetches
        await asyncio.sleep(2)
        assert 0 < broker.fetches - before <= 20


async def test_a_record_ends_the_wait_of_a_fetch(broker, admin) -> None:
    await admin.create_topics([NewTopic("t", 1, 1)])
    options = {"fetch_max_wait_ms": 300_000, "request_timeout_ms": 400_000}
    async with producing(broker) as producer, consuming(broker, "t", **options) as consumer:
        for i in range(20):
            await asyncio.sleep(0.02)
            await producer.send("t", b"%d" % i)
            record = await asyncio.wait_for(consumer.getone(), 60)
            assert int(record.value) == i


async def test_a_killed_member_s_partitions_go_to_the_next_one(broker, admin) -> None:
    await admin.create_topics([NewTopic("t", 1, 1)])
    killed = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", CONSUME_UNTIL_KILLED, broker.bootstrap_servers],
        stdout=asyncio.subprocess.PIPE,
    )
    assert killed.stdout is not None
    assert await killed.stdout.readline() == b"joined\n"
    killed.kill()
    await killed.wait()
    async with producing(broker) as producer, consuming(broker, "t", group_id="g") as consumer:
        await producer.send_and_wait("t", b"1")
        record = await asyncio.wait_for(consumer.getone(), 60)
        assert record.value == b"1"


async def test_a_consumer_survives_commits_that_meet_a_rebalance(broker, admin) -> None:
    await admin.create_topics([NewTopic("t", 4, 1)])
    options = {"group_id": "g", "heartbeat_interval_ms": 200, "session_timeout_ms": 6000}
    refused = 0
    async with AsyncExitStack() as stack:
        producer = await stack.enter_async_context(producing(broker))
        first = await stack.enter_async_context(consuming(broker, "t", **options))
        joining = asyncio.create_task(stack.enter_async_context(consuming(broker, "t", **options)))
        while not joining.done() or len(first.assignment()) != 2:
            try:
                await first.commit(dict.fromkeys(first.assignment(), (0, "")))
            except CommitFailedError:
                refused += 1
            await asyncio.sleep(0.005)
        assert refused > 0
        second = joining.result()
        await until(lambda: len(second.assignment()) == 2)
        for partition in range(4):
            await producer.send_and_wait("t", b"%d" % partition, partition=partition)
        got = [await asyncio.wait_for(c.getone(), 60) for c in (first, second) for _ in range(2)]
        assert sorted(int(record.value) for record in got) == [0, 1, 2, 3]
        await first.commit()
        await second.commit()


async def test_librdkafka_works_with_it(broker, admin) -> None:
    await admin.create_topics([NewTopic("t", 1, 1)])

    def there_and_back() -> bytes | None:
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": broker.bootstrap_servers, "enable.idempotence": True}
        )
        producer.produce("t", b"from C")
        assert producer.flush(30) == 0
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": broker.bootstrap_servers, "group.id": "c", "auto.offset.reset": "earliest"}
        )
        consumer.subscribe(["t"])
        message = consumer.poll(30)
        consumer.close()
        return message and message.value()

    assert await asyncio.to_thread(there_and_back) == b"from C"


async def test_what_is_not_kafka_s_protocol_ends_only_its_own_connection(broker, admin) -> None:
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4\0\1\0\1", b"\xff" * 64, b"\0\0\0\0"):
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        writer.write(junk)
        writer.write_eof()
        await reader.read()
        writer.close()
    assert await admin.describe_cluster()


async def test_data_in_a_named_folder_outlives_the_broker(tmp_path: Path) -> None:
    async with EmbeddedBroker(tmp_path) as first, producing(first) as producer:
        admin = AIOKafkaAdminClient(bootstrap_servers=first.bootstrap_servers)
        await admin.start()
        await admin.create_topics([NewTopic("t", 1, 1)])
        await admin.close()
        await producer.send_and_wait("t", b"kept")
    async with EmbeddedBroker(tmp_path) as second, consuming(second, "t") as consumer:
        assert (await asyncio.wait_for(consumer.getone(), 60)).value == b"kept"


async def test_it_leaves_nothing_behind() -> None:
    async with EmbeddedBroker() as broker:
        assert broker.data_dir.is_dir()
        pid = broker._process.pid
    assert not broker.data_dir.exists()
    assert not alive(pid)


async def test_it_dies_with_the_process_that_started_it() -> None:
    parent = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", HOLD_A_BROKER], stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid, folder = (await parent.stdout.readline()).split()
    assert alive(int(pid))
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await until(lambda: not alive(int(pid)))
    shutil.rmtree(folder.decode())


async def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    with pytest.raises(EmbeddedBrokerFailed, match=r"pip install 'plait\[embedded\]'"):
        async with EmbeddedBroker():
            pass


async def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedBrokerFailed, match=f"port {port} cannot be used"):
            async with EmbeddedBroker(port=port):
                pass


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
