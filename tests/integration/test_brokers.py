"""Both brokers that the other tests rely on: the real one and the embedded one."""

from __future__ import annotations

import uuid

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from kafka_broker import KafkaBroker, answers


@pytest.fixture(params=[pytest.param("kafka", marks=pytest.mark.kafka), "embedded_broker"])
def servers(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param).bootstrap_servers


async def test_a_record_goes_in_and_comes_out_with_its_key_and_headers(servers: str) -> None:
    topic = f"smoke-{uuid.uuid4().hex[:8]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    producer = AIOKafkaProducer(bootstrap_servers=servers, acks="all", enable_idempotence=True)
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=servers, group_id=topic, auto_offset_reset="earliest"
    )
    await admin.start()
    try:
        created = await admin.create_topics([NewTopic(topic, 1, 1)])
        assert created.topic_errors[0][1] == 0
        await producer.start()
        await consumer.start()
        await producer.send_and_wait(topic, b"value", key=b"key", headers=[("name", b"\xff")])
        record = await consumer.getone()
        assert (record.key, record.value, list(record.headers)) == (b"key", b"value", [("name", b"\xff")])
        await consumer.commit()
    finally:
        await consumer.stop()
        await producer.stop()
        await admin.close()


async def test_topics_are_not_made_by_accident(servers: str) -> None:
    missing = f"missing-{uuid.uuid4().hex[:8]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        described = await admin.describe_topics([missing])
        assert described[0]["error_code"] == 3
        assert missing not in await admin.list_topics()
    finally:
        await admin.close()


@pytest.mark.kafka
async def test_a_killed_broker_comes_back_with_its_records(own_kafka: KafkaBroker) -> None:
    servers = own_kafka.bootstrap_servers
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    await admin.create_topics([NewTopic("kept", 1, 1)])
    await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=servers, acks="all")
    await producer.start()
    await producer.send_and_wait("kept", b"value")
    await producer.stop()
    own_kafka.kill()
    assert not answers(own_kafka.port)
    own_kafka.start()
    consumer = AIOKafkaConsumer("kept", bootstrap_servers=servers, auto_offset_reset="earliest")
    await consumer.start()
    assert (await consumer.getone()).value == b"value"
    await consumer.stop()
    own_kafka.stop()
    assert not answers(own_kafka.port)
