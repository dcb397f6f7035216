"""The wire: what producers send, what workers answer. Imports pydantic and msgpack, nothing heavier."""

from plait.schemas import headers
from plait.schemas.asyncapi import asyncapi_document
from plait.schemas.codec import (
    JSON,
    MSGPACK,
    canonical_type,
    decode_control,
    decode_event,
    decode_request,
    encode,
    tokens_event_bytes,
)
from plait.schemas.control import Cancel
from plait.schemas.errors import ErrorCode, WireError
from plait.schemas.events import (
    DoneEvent,
    ErrorEvent,
    Event,
    FinishReason,
    SloResult,
    Timing,
    TokenLogprob,
    TokensEvent,
    TopLogprob,
    Usage,
)
from plait.schemas.json_schema import json_schemas
from plait.schemas.names import WIRE_VERSION, is_request_id, is_tenant, is_topic, response_topic_of
from plait.schemas.request import Message, PromptRef, Request, Sampling, Slo

__all__ = [
    "JSON",
    "MSGPACK",
    "WIRE_VERSION",
    "Cancel",
    "DoneEvent",
    "ErrorCode",
    "ErrorEvent",
    "Event",
    "FinishReason",
    "Message",
    "PromptRef",
    "Request",
    "Sampling",
    "Slo",
    "SloResult",
    "Timing",
    "TokenLogprob",
    "TokensEvent",
    "TopLogprob",
    "Usage",
    "WireError",
    "asyncapi_document",
    "canonical_type",
    "decode_control",
    "decode_event",
    "decode_request",
    "encode",
    "headers",
    "is_request_id",
    "is_tenant",
    "is_topic",
    "json_schemas",
    "response_topic_of",
    "tokens_event_bytes",
]
