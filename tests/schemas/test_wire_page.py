"""docs/wire.md says what the code does: its examples decode, its tables are complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from pydantic import BaseModel

from plait.schemas import (
    Cancel,
    DoneEvent,
    ErrorCode,
    Request,
    Sampling,
    Slo,
    SloResult,
    Timing,
    Usage,
    decode_control,
    decode_event,
    decode_request,
    headers,
    json_schemas,
)
from plait.schemas.names import CONTROL_TOPIC, DLQ_TOPIC, REQUESTS_TOPIC, RESPONSES_PREFIX
from plait.schemas.parse import MAX_VALUE_BYTES
from plait.schemas.plain import MAX_CONTAINERS, MAX_DEPTH
from plait.schemas.request import MAX_METADATA_BYTES, MAX_METADATA_DEPTH, MAX_PROMPT_TOKENS

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
EXAMPLES = re.findall(r"^```json (\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
DECODE = {"request": decode_request, "event": decode_event, "control": decode_control}


def test_there_are_examples_of_every_kind() -> None:
    assert {kind for kind, _ in EXAMPLES} == set(DECODE)
    assert PAGE.count("```json") == len(EXAMPLES)
    kinds = [json.loads(text)["type"] for kind, text in EXAMPLES if kind == "event"]
    assert set(kinds) == {"tokens", "done", "error"}


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_examples_decode(kind: str, text: str) -> None:
    DECODE[kind](text.encode(), "application/json")
    jsonschema.Draft202012Validator(json_schemas()[kind]).validate(json.loads(text))


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of the first table after a heading, by their first cell's names."""
    table = PAGE.partition(f"\n{heading}\n")[2].partition("\n| ")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]
    return {name: row for row in cells for name in re.findall(r"`([^`]+)`", row[0])}


@pytest.mark.parametrize(("heading", "model"), [("## Request", Request), ("### Sampling", Sampling)])
def test_tables_name_every_field_and_default(heading: str, model: type[BaseModel]) -> None:
    table = rows(heading)
    assert set(table) == set(model.model_fields)
    for name, field in model.model_fields.items():
        default = table[name][-1].strip("`")
        if isinstance(field.default, bool | int | float) or field.default == [] or field.default == {}:
            assert default == json.dumps(field.default), name


def test_the_page_names_every_field_of_the_other_models() -> None:
    for model in (DoneEvent, Usage, Timing, Slo, SloResult, Cancel):
        for name in model.model_fields:
            assert f"`{name}`" in PAGE or f'"{name}"' in PAGE, name


def test_the_page_names_codes_headers_and_topics() -> None:
    assert list(rows("## Events")) == [code.value for code in ErrorCode]
    for name, value in vars(headers).items():
        if name.isupper():
            for header in value if isinstance(value, tuple) else (value,):
                assert f"`{header}`" in PAGE
    for topic in (REQUESTS_TOPIC, RESPONSES_PREFIX + "<request_id>", CONTROL_TOPIC, DLQ_TOPIC):
        assert f"`{topic}`" in PAGE


def test_the_page_names_the_limits() -> None:
    assert f"over {MAX_VALUE_BYTES // 2**20} MiB" in PAGE
    assert f"more than {MAX_DEPTH} levels, more than {MAX_CONTAINERS:,} maps and lists" in PAGE
    assert f"{MAX_METADATA_BYTES:,} bytes as compact JSON and {MAX_METADATA_DEPTH} levels" in PAGE
    assert f"1 to {MAX_PROMPT_TOKENS:,} integers" in PAGE


def test_limits_in_the_tables_are_those_of_the_schema() -> None:
    schema = json_schemas()["request"]
    for heading, fields in (
        ("## Request", schema["properties"]),
        ("### Sampling", schema["$defs"]["Sampling"]["properties"]),
    ):
        for name, row in rows(heading).items():
            bounds = fields[name]["anyOf"][0] if "anyOf" in fields[name] else {}
            for key in ("minimum", "maximum", "exclusiveMinimum", "maxLength", "maxItems", "maxProperties"):
                if key in bounds:
                    assert as_written(bounds[key]) in row[1], (name, key)
    objectives = schema["$defs"]["Slo"]["properties"]
    for choice in objectives.pop("on_miss")["anyOf"][0]["enum"]:
        assert f"`{choice}`" in PAGE
    for name, limits in objectives.items():
        assert f"`{name}` 1 to {limits['anyOf'][0]['maximum']:,}" in PAGE


def as_written(number: int) -> str:
    powers = {2**31 - 1: "2^31-1", 2**53: "2^53", 2**63 - 1: "2^63-1", -(2**63): "-2^63"}
    return powers.get(number, f"{number:,}")
