"""The wire as an AsyncAPI 3.0 document, seen from the worker."""

from __future__ import annotations

from typing import Any

from plait.schemas import headers
from plait.schemas.events import DoneEvent, ErrorEvent, TokensEvent
from plait.schemas.json_schema import Schema, control_schema, event_schema, request_schema
from plait.schemas.names import CONTROL_TOPIC, DLQ_TOPIC, REQUESTS_TOPIC, RESPONSES_PREFIX, WIRE_VERSION
from plait.schemas.parse import JSON, MSGPACK

_EVENTS = {"tokens": TokensEvent, "done": DoneEvent, "error": ErrorEvent}


def asyncapi_document() -> dict[str, Any]:
    """The document: a channel per topic, an operation per thing the worker does with it."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "plait",
            "version": f"{WIRE_VERSION}.0.0",
            "description": "Requests for text generation in, streams of tokens out. Values are msgpack "
            "maps or the same maps as JSON objects.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": MSGPACK,
        "channels": _channels(),
        "operations": _operations(),
        "components": {
            "schemas": _schemas(),
            "messages": _messages(),
            "messageTraits": {"traced": {"headers": {"$ref": "#/components/schemas/TraceHeaders"}}},
            "correlationIds": {
                "correlation": {"location": f"$message.header#/{headers.CORRELATION_IDS[0]}"},
            },
        },
    }


def _channels() -> dict[str, Any]:
    events = ("tokens", "done", "error")
    return {
        "requests": _channel(REQUESTS_TOPIC, "Requests.", ("request",)),
        "responses": {
            **_channel(
                RESPONSES_PREFIX + "{request_id}",
                "The events of one request that named no response topic. One partition; made by the "
                "worker and removed by it after a time to live.",
                events,
            ),
            "parameters": {"request_id": {"description": "The request's id."}},
        },
        "sharedResponses": _channel(
            None,
            "The topic that a request names in `response_topic`, or else in a header: events of many "
            "requests, keyed by request id.",
            events,
        ),
        "control": _channel(CONTROL_TOPIC, "Cancellations. Every worker reads all of them.", ("cancel",)),
        "deadLetters": _channel(DLQ_TOPIC, "Messages that nobody could be answered for.", ("deadLetter",)),
    }


def _channel(address: str | None, description: str, messages: tuple[str, ...]) -> dict[str, Any]:
    return {
        "address": address,
        "description": description,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
    }


def _operations() -> dict[str, Any]:
    return {
        "receiveRequest": {
            **_operation("receive", "requests", ("request",)),
            "reply": {
                "address": {
                    "location": "$message.payload#/response_topic",
                    "description": f"Without it the topic is {RESPONSES_PREFIX}<request_id>.",
                },
                "channel": {"$ref": "#/channels/sharedResponses"},
            },
        },
        "sendEvents": _operation("send", "responses", ("tokens", "done", "error")),
        "sendSharedEvents": _operation("send", "sharedResponses", ("tokens", "done", "error")),
        "receiveCancel": _operation("receive", "control", ("cancel",)),
        "sendDeadLetter": _operation("send", "deadLetters", ("deadLetter",)),
    }


def _operation(action: str, channel: str, messages: tuple[str, ...]) -> dict[str, Any]:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel}"},
        "messages": [{"$ref": f"#/channels/{channel}/messages/{name}"} for name in messages],
    }


def _messages() -> dict[str, Any]:
    messages = {
        "request": _message(
            "Request", "RequestHeaders", "A request; keyed by anything, the request id by default."
        ),
        "cancel": _message("Cancel", "EncodingHeaders", "Ends a request, wherever it is."),
    }
    for name, model in _EVENTS.items():
        summary = (model.__doc__ or "").partition("\n")[0]
        messages[name] = _message(model.__name__, "EventHeaders", summary)
    for message in messages.values():
        message["correlationId"] = {"$ref": "#/components/correlationIds/correlation"}
        message["traits"] = [{"$ref": "#/components/messageTraits/traced"}]
    del messages["cancel"]["correlationId"]
    messages["deadLetter"] = {
        "title": "deadLetter",
        "summary": "A message as it came, byte for byte, with its headers and those that say why it is here.",
        "contentType": "application/octet-stream",
        "headers": {"$ref": "#/components/schemas/DeadLetterHeaders"},
        "payload": {},
    }
    return messages


def _message(model: str, header: str, summary: str) -> dict[str, Any]:
    return {
        "title": model,
        "summary": summary,
        "contentType": MSGPACK,
        "headers": {"$ref": f"#/components/schemas/{header}"},
        "payload": {"$ref": f"#/components/schemas/{model}"},
        "bindings": {"kafka": {"key": {"type": "string", "description": "The request id."}}},
    }


def _schemas() -> dict[str, Schema]:
    schemas: dict[str, Schema] = {}
    for name, schema in (
        ("Request", request_schema("#/components/schemas/{model}")),
        ("Event", event_schema("#/components/schemas/{model}")),
        ("Cancel", control_schema("#/components/schemas/{model}")),
    ):
        schemas.update(schema.pop("$defs", {}))
        schemas[name] = schema
    text = {"type": "string"}
    trace = dict.fromkeys((headers.TRACEPARENT, headers.TRACESTATE, headers.BAGGAGE), text)
    encoding = {headers.CONTENT_TYPE: {"type": "string", "examples": [MSGPACK, JSON]}}
    correlation = dict.fromkeys(headers.CORRELATION_IDS, text)
    reply = dict.fromkeys(headers.REPLY_TOPICS, text)
    why = (
        headers.DLQ_REASON,
        headers.DLQ_TOPIC,
        headers.DLQ_PARTITION,
        headers.DLQ_OFFSET,
        headers.DLQ_TIMESTAMP,
    )
    return schemas | {
        "TraceHeaders": _headers("W3C Trace Context and Baggage.", trace),
        "EncodingHeaders": _headers(
            "How the value is encoded; told from its first byte when absent.", encoding
        ),
        "RequestHeaders": _headers(
            "Correlation ids come back in the events; the reply topic counts where the request names none.",
            encoding | correlation | reply,
        ),
        "EventHeaders": _headers(
            "`plait-type` is the event's type, so that a body need not be read.",
            encoding | correlation | {headers.PLAIT_TYPE: {"enum": list(_EVENTS)}},
            required=[headers.CONTENT_TYPE, headers.PLAIT_TYPE],
        ),
        "DeadLetterHeaders": _headers(
            "Why, and the topic, partition, offset and timestamp the message came from, as decimal text.",
            dict.fromkeys(why, text),
            required=list(why),
        ),
    }


def _headers(description: str, properties: dict[str, Any], required: list[str] | None = None) -> Schema:
    schema: Schema = {"type": "object", "description": description, "properties": properties}
    return schema | ({"required": required} if required else {})
