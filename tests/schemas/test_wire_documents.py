"""The JSON Schemas and the AsyncAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from plait.schemas import ErrorCode, asyncapi_document, headers, json_schemas

DOCUMENT = asyncapi_document()

# The fields that AsyncAPI 3.0.0 allows in each object that the document uses.
ROOT = {"asyncapi", "id", "info", "servers", "defaultContentType", "channels", "operations", "components"}
CHANNEL = {
    "address",
    "messages",
    "title",
    "summary",
    "description",
    "servers",
    "parameters",
    "tags",
    "bindings",
}
OPERATION = {
    "action",
    "channel",
    "title",
    "summary",
    "description",
    "tags",
    "bindings",
    "traits",
    "messages",
    "reply",
}
TRAIT = {
    "headers",
    "correlationId",
    "contentType",
    "name",
    "title",
    "summary",
    "description",
    "bindings",
    "examples",
}
MESSAGE = TRAIT | {"payload", "traits"}
COMPONENTS = {"schemas", "messages", "messageTraits", "correlationIds"}


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from nodes(child)


def resolve(document: dict[str, Any], reference: str) -> Any:
    assert reference.startswith("#/")
    target: Any = document
    for part in reference[2:].split("/"):
        target = target[part.replace("~1", "/").replace("~0", "~")]
    return target


@pytest.mark.parametrize("document", [DOCUMENT, *json_schemas().values()], ids=["asyncapi", *json_schemas()])
def test_references_resolve_and_it_is_json(document: dict[str, Any]) -> None:
    references = [node["$ref"] for node in nodes(document) if isinstance(node.get("$ref"), str)]
    for reference in references:
        assert isinstance(resolve(document, reference), dict)
    assert json.loads(json.dumps(document, allow_nan=False)) == document


@pytest.mark.parametrize("name", ["request", "event", "control"])
def test_schemas_are_valid_2020_12(name: str) -> None:
    schema = json_schemas()[name]
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)


def test_the_schema_says_the_defaults_and_the_codes() -> None:
    schemas = json_schemas()
    sampling = schemas["request"]["$defs"]["Sampling"]["properties"]
    assert sampling["temperature"]["default"] == 1.0 and "default" not in sampling["max_tokens"]
    assert schemas["request"]["properties"]["priority"]["default"] == 4
    assert schemas["event"]["$defs"]["ErrorCode"]["enum"] == [code.value for code in ErrorCode]


def test_asyncapi_has_the_structure_of_3_0() -> None:
    assert DOCUMENT["asyncapi"] == "3.0.0" and set(DOCUMENT) <= ROOT
    assert {"title", "version"} <= set(DOCUMENT["info"])
    assert set(DOCUMENT["components"]) <= COMPONENTS
    for channel in DOCUMENT["channels"].values():
        assert set(channel) <= CHANNEL and channel["messages"]
        for message in channel["messages"].values():
            assert message["$ref"].startswith("#/components/messages/")
    for operation in DOCUMENT["operations"].values():
        assert set(operation) <= OPERATION
        assert operation["action"] in ("send", "receive")
        channel = resolve(DOCUMENT, operation["channel"]["$ref"])
        assert channel in DOCUMENT["channels"].values()
        for message in operation["messages"]:
            # 3.0.0: a subset of the messages of the operation's own channel, by reference to them.
            assert message["$ref"].startswith(operation["channel"]["$ref"] + "/messages/")
    for message in DOCUMENT["components"]["messages"].values():
        assert set(message) <= MESSAGE
        assert resolve(DOCUMENT, message["headers"]["$ref"])["type"] == "object"
    for trait in DOCUMENT["components"]["messageTraits"].values():
        assert set(trait) <= TRAIT


def test_asyncapi_parameters_are_those_of_the_addresses() -> None:
    for channel in DOCUMENT["channels"].values():
        address = channel["address"] or ""
        for name in channel.get("parameters", {}):
            assert "{" + name + "}" in address
        assert address.count("{") == len(channel.get("parameters", {}))


def test_asyncapi_covers_every_topic_and_message() -> None:
    addresses = {channel["address"] for channel in DOCUMENT["channels"].values()}
    assert addresses == {"plait.requests", "plait.responses.{request_id}", None, "plait.control", "plait.dlq"}
    used = {m["$ref"] for o in DOCUMENT["operations"].values() for m in o["messages"]}
    listed = {
        f"#/channels/{c}/messages/{m}" for c, body in DOCUMENT["channels"].items() for m in body["messages"]
    }
    assert used == listed
    reached = {resolve(DOCUMENT, reference)["$ref"].rpartition("/")[2] for reference in used}
    assert reached == set(DOCUMENT["components"]["messages"])


def test_asyncapi_names_every_header() -> None:
    text = json.dumps(DOCUMENT)
    names = [value for name, value in vars(headers).items() if name.isupper()]
    for value in names:
        for name in value if isinstance(value, tuple) else (value,):
            assert json.dumps(name) in text


def test_asyncapi_payloads_take_the_messages() -> None:
    schema = {"$ref": "#/components/schemas/Request", "components": DOCUMENT["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"request_id": "a", "prompt": "x"})
    assert not validator.is_valid({"request_id": "a"})
