"""The documentation names what the code has."""

import re
from pathlib import Path

from plait.service import names
from plait.service.settings import LaneSettings, Settings

DOCS = Path(__file__).parents[2] / "docs"


def test_every_setting_is_documented_with_its_default() -> None:
    text = (DOCS / "configuration.md").read_text()
    documented = {}
    for section in text.split("\n## `[")[1:]:
        name = section[: section.index("]")]
        for line in section.splitlines():
            if line.startswith("| `"):
                key, default = (
                    cell.strip().strip("`").replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:3]
                )
                documented[f"{name}.{key}"] = default
    actual = {
        f"{section}.{key}": ""
        if value is None
        else str(value).lower()
        if value in (True, False)
        else str(value)
        for section, fields in Settings.model_construct().model_dump().items()
        for key, value in fields.items()
    }
    actual["kafka.sasl_password"] = ""
    for key, field in LaneSettings.model_fields.items():
        default = "" if field.is_required() or field.default is None else str(field.default)
        actual[f"[topics.lanes.{key}"] = default
    for key, value in actual.items():
        assert documented.get(key) == value, key
    assert documented.keys() == actual.keys()


def test_spans_outcomes_and_settings_in_the_texts_exist() -> None:
    tracing = (DOCS / "tracing.md").read_text()
    for name in vars(names):
        if name.startswith(("SPAN_", "OUTCOME_", "EVENT_")):
            assert f"`{getattr(names, name)}" in tracing, name
    settings = Settings.model_construct().model_dump()
    for file in ("delivery.md", "tracing.md"):
        for word in (DOCS / file).read_text().split("`")[1::2]:
            section, _, key = word.partition(".")
            if section in settings and key != "py" and key.replace("_", "").isalnum():
                assert key in settings[section], f"{file}: {word}"
