"""`plait schema`: the wire for other languages."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Document(StrEnum):
    REQUEST = "request"
    EVENT = "event"
    EVENTS = "events"
    CONTROL = "control"
    ASYNCAPI = "asyncapi"


def command(
    document: Annotated[Document | None, typer.Argument(help="One document; all of them without.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write files to this folder instead.", file_okay=False)
    ] = None,
) -> None:
    """Print the JSON Schemas of the wire and its AsyncAPI document."""
    documents = _documents()
    if document is not None:
        name = "event" if document == Document.EVENTS else document.value
        documents = {name: documents[name]}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in documents.items():
            file = out / ("asyncapi.json" if name == "asyncapi" else f"{name}.schema.json")
            file.write_text(_text(content) + "\n", encoding="utf-8")
            typer.echo(str(file))
        return
    typer.echo(_text(documents if document is None else next(iter(documents.values()))))


def _documents() -> dict[str, Any]:
    from plait.schemas.asyncapi import asyncapi_document
    from plait.schemas.json_schema import json_schemas

    return {**json_schemas(), "asyncapi": asyncapi_document()}


def _text(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False)
