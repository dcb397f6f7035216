"""Where to read on when the offset to read is not there: below the log's beginning, or above its end."""

from __future__ import annotations

import logging
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import NoOffsetForPartitionError, OffsetOutOfRangeError

from plait.service.metrics import Metrics

log = logging.getLogger(__name__)

Astray = (NoOffsetForPartitionError, OffsetOutOfRangeError)


class OutOfRange(RuntimeError):
    """The policy is to fail: somebody has to look at it."""


async def find(consumer: Any, error: Exception, policy: str, metrics: Metrics) -> dict[TopicPartition, int]:
    """Where to read on, by partition that this error of aiokafka is about.

    A partition that the group has never read is read from its beginning. One whose log was cut off above the position
    (retention, deleted records), or ends below it (the topic was made anew, or lost its end with an unclean leader), by
    the policy. Raises OutOfRange when that is `fail`, and KafkaError.
    """
    if isinstance(error, NoOffsetForPartitionError):
        tp = error.args[0]
        return {tp: (await consumer.beginning_offsets([tp]))[tp]}
    wanted: dict[TopicPartition, int] = error.args[0]
    begins, ends = await consumer.beginning_offsets(wanted), await consumer.end_offsets(wanted)
    for tp, offset in wanted.items():
        metrics.out_of_range.labels(policy=policy).inc()
        log.error(
            "%s[%d]: offset %d is out of range, the log holds %d to %d; kafka.on_out_of_range is %s: %s",
            *(tp.topic, tp.partition, offset, begins[tp], ends[tp], policy),
            f"{max(0, begins[tp] - offset)} requests were never read"
            if offset < begins[tp]
            else "it was cut off",
        )
        if policy == "fail":
            raise OutOfRange(
                f"{tp.topic}[{tp.partition}]: offset {offset} is out of range, the log holds {begins[tp]} to"
                f" {ends[tp]} (kafka.on_out_of_range)"
            )
    return dict(ends if policy == "latest" else begins)
