"""What README and docs show is what the repository holds and the command line takes."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from plait.service.cli import app
from plait.service.settings import Settings

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{n}.md" for n in ("architecture", "engine", "client", "cli")),
]
BLOCK = re.compile(r"(?:<!-- (\S+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(page.name, *block) for page in PAGES for block in BLOCK.findall(page.read_text())]
COMMANDS = sorted(
    {line for _, _, kind, text in BLOCKS if kind == "sh" for line in text.splitlines()}
    | {f"plait {c}" for page in PAGES for c in re.findall(r"`plait (\w[^`]*)`", page.read_text())}
)


def test_every_block_of_code_is_the_file_it_names():
    for page, name, kind, text in BLOCKS:
        if kind != "sh":
            assert name, f"{page}: a block of {kind or 'text'} names no file"
            assert text == (ROOT / name).read_text(), f"{page} shows another {name}"


def test_every_example_is_shown_as_it_is():
    shown = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for name, _, text in BLOCK.findall(page.read_text()):
            if name:
                assert text == (ROOT / name).read_text(), f"{page.name} shows another {name}"
                shown.add(name)
    assert {f"examples/{file.name}" for file in (ROOT / "examples").iterdir() if file.is_file()} == shown


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_line_is_understood(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line.rpartition("|")[2])
    assert words[0] == "plait"
    command = get_command(app).commands[words[1]]
    command.make_context(words[1], words[2:], resilient_parsing=len(words) == 2)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_configuration_that_is_shown_is_valid(monkeypatch):
    settings = Settings.load(ROOT / "examples" / "plait.toml")
    assert settings.worker.max_in_flight == 256 and settings.http.host == "0.0.0.0"


def test_every_command_is_documented():
    text = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"## plait {name}\n" in text for name in get_command(app).commands)
