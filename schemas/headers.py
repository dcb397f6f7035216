"""Names of the Kafka headers that plait reads and writes."""

from __future__ import annotations

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
BAGGAGE = "baggage"

CONTENT_TYPE = "content-type"
PLAIT_TYPE = "plait-type"

# As FastStream and as Spring Kafka name them.
CORRELATION_IDS = ("correlation_id", "kafka_correlationId")
REPLY_TOPICS = ("reply_to", "kafka_replyTopic")

DLQ_REASON = "plait-dlq-reason"
DLQ_TOPIC = "plait-dlq-topic"
DLQ_PARTITION = "plait-dlq-partition"
DLQ_OFFSET = "plait-dlq-offset"
DLQ_TIMESTAMP = "plait-dlq-timestamp"
