"""Names, versions and limits that the whole wire shares."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

WIRE_VERSION = 1
KNOWN_VERSIONS = (1,)

REQUESTS_TOPIC = "plait.requests"
RESPONSES_PREFIX = "plait.responses."
CONTROL_TOPIC = "plait.control"
DLQ_TOPIC = "plait.dlq"

REQUEST_ID_PATTERN = r"^[A-Za-z0-9._-]{1,200}$"
TENANT_PATTERN = r"^[A-Za-z0-9._:@/+=-]{1,128}$"
TOPIC_PATTERN = r"^[A-Za-z0-9._-]{1,249}$"

MAX_INT32 = 2**31 - 1
MAX_SAFE_INT = 2**53

_REQUEST_ID = re.compile(REQUEST_ID_PATTERN[1:-1])
_TENANT = re.compile(TENANT_PATTERN[1:-1])
_TOPIC = re.compile(TOPIC_PATTERN[1:-1])


def is_request_id(value: object) -> bool:
    return isinstance(value, str) and _REQUEST_ID.fullmatch(value) is not None


def is_tenant(value: object) -> bool:
    return isinstance(value, str) and _TENANT.fullmatch(value) is not None


def is_topic(value: object) -> bool:
    """Whether Kafka takes this as a topic's name."""
    return isinstance(value, str) and _TOPIC.fullmatch(value) is not None and value not in (".", "..")


def response_topic_of(request_id: str) -> str:
    """The topic of a request that names none."""
    return RESPONSES_PREFIX + request_id


def _not_dots(value: str) -> str:
    if value in (".", ".."):
        raise PydanticCustomError("topic", "must not be '.' or '..'")
    return value


RequestId = Annotated[str, Field(pattern=REQUEST_ID_PATTERN)]
Topic = Annotated[
    str,
    Field(pattern=TOPIC_PATTERN, json_schema_extra={"not": {"enum": [".", ".."]}}),
    AfterValidator(_not_dots),
]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
