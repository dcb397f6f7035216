"""The same with any Kafka client: here confluent-kafka (pip install confluent-kafka) and JSON, nothing of plait."""

import json
import sys
import time
import uuid

from confluent_kafka import Consumer, Producer

servers = sys.argv[1]
request_id = f"example-{uuid.uuid4()}"
request = {
    "v": 1,
    "request_id": request_id,
    "messages": [{"role": "user", "content": "Name three rivers."}],
    "sampling": {"max_tokens": 40, "temperature": 0},
    "priority": 5,
    "created_at": int(time.time() * 1000),
}

producer = Producer({"bootstrap.servers": servers})
headers = {"content-type": "application/json"}
producer.produce("plait.requests", json.dumps(request), key=request_id, headers=headers)
producer.flush()

# Without a response_topic in the request, the worker makes a topic for it.
consumer = Consumer(
    {
        "bootstrap.servers": servers,
        "group.id": request_id,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "topic.metadata.refresh.interval.ms": 200,
        "allow.auto.create.topics": False,
    }
)
consumer.subscribe([f"plait.responses.{request_id}"])
while True:
    message = consumer.poll(1.0)
    if message is None or message.error():
        continue
    event = json.loads(message.value())
    if event["type"] == "tokens":
        print(event["text"], end="", flush=True)
    elif event["type"] == "done":
        print(f"\n{event['usage']['completion_tokens']} tokens, {event['finish_reason']}")
        break
    else:
        sys.exit(f"{event['code']}: {event['message']}")
consumer.close()
