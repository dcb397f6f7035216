"""The wire's models as JSON Schema 2020-12."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from plait.schemas.control import Cancel
from plait.schemas.events import Event
from plait.schemas.request import INPUTS, Request

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]
Mode = Literal["validation", "serialization"]


def json_schemas() -> dict[str, Schema]:
    """One schema each for `request`, `event` and `control`."""
    return {
        "request": _root("plait request, wire version 1", request_schema()),
        "event": _root("plait event, wire version 1", event_schema()),
        "control": _root("plait control message, wire version 1", control_schema()),
    }


def request_schema(ref_template: str = "#/$defs/{model}") -> Schema:
    """What producers may write: null stands for absent in every optional field."""
    schema = _of(Request, ref_template)
    for model in _models(schema):
        required = model.get("required", [])
        for name, field in model["properties"].items():
            if name not in required:
                model["properties"][name] = _nullable(field)
    schema["oneOf"] = [
        {"required": [name], "properties": {name: {"type": kind}}}
        for name, kind in zip(INPUTS, ("string", "array", "array", "object"), strict=True)
    ]
    return schema


def event_schema(ref_template: str = "#/$defs/{model}") -> Schema:
    """What workers write: a field is there or left out, never null."""
    schema = _of(TypeAdapter(Event), ref_template)
    for model in _models(schema):
        optional = []
        for name, field in model["properties"].items():
            if {"type": "null"} in field.get("anyOf", ()):
                optional.append(name)
                model["properties"][name] = _not_null(field)
        model["required"] = [name for name in model["properties"] if name not in optional]
    # `discriminator` is OpenAPI's; `type` is a constant in each branch, which says the same.
    schema.pop("discriminator", None)
    return schema


def control_schema(ref_template: str = "#/$defs/{model}") -> Schema:
    schema = _of(Cancel, ref_template)
    schema["required"] = ["type", "request_id"]
    return schema


def _of(model: type[BaseModel] | TypeAdapter[Any], ref_template: str) -> Schema:
    adapter = model if isinstance(model, TypeAdapter) else TypeAdapter(model)
    schema = adapter.json_schema(ref_template=ref_template)
    for node in _nodes(schema):
        # pydantic titles every field with its own name.
        if isinstance(node.get("title"), str):
            del node["title"]
        default = node.get("default", 0)
        if default is None:
            del node["default"]
        elif isinstance(default, dict):
            # What is left out counts as an empty map; its fields say their own defaults.
            node["default"] = {}
    return schema


def _root(title: str, schema: Schema) -> Schema:
    return {"$schema": DIALECT, "title": title, **schema}


def _models(schema: Schema) -> Iterator[Schema]:
    return (node for node in [schema, *schema.get("$defs", {}).values()] if "properties" in node)


def _nodes(node: Any) -> Iterator[Schema]:
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _nodes(child)


def _nullable(field: Schema) -> Schema:
    if {"type": "null"} in field.get("anyOf", ()):
        return field
    inner = dict(field)
    outer: Schema = {"default": inner.pop("default")} if "default" in inner else {}
    return {"anyOf": [inner, {"type": "null"}], **outer}


def _not_null(field: Schema) -> Schema:
    branches = [branch for branch in field["anyOf"] if branch != {"type": "null"}]
    outer = {key: value for key, value in field.items() if key not in ("anyOf", "default")}
    inner: Schema = branches[0] if len(branches) == 1 else {"anyOf": branches}
    return {**inner, **outer}
