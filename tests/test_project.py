"""The rules of the repository: who may import whom, what is installed, how large a file may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("schemas", "kernels", "engine", "service")
CODE = {".py", ".cpp", ".h", ".sh", ".yml", ".yaml", ".toml"}

# Beside the standard library and itself, a room imports these.
ALLOWED = {
    "schemas": {"msgpack", "pydantic", "pydantic_core"},
    "kernels": {"torch", "triton", "numpy"},
    "engine": {
        *{
            "plait.kernels",
            "torch",
            "transformers",
            "tokenizers",
            "safetensors",
            "numpy",
            "jinja2",
            "msgpack",
        },
        *{"filelock", "huggingface_hub"},
    },
    "service": {
        *{"plait.schemas", "plait.engine", "aiokafka", "aiohttp", "opentelemetry", "prometheus_client"},
        *{"pydantic", "pydantic_settings", "rich", "typer", "torch", "transformers", "yarl"},
        "matplotlib",
    },
}
# Heavy: in these rooms only inside a function, by who needs it.
LATE = {"service": {"torch", "transformers", "matplotlib"}}

REFUSE_HEAVY_IMPORTS = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {
            "torch", "transformers", "numpy", "triton", "tokenizers", "safetensors", "matplotlib"
        }:
            raise ImportError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
importlib.import_module(sys.argv[1])
"""


def sources(room: str) -> list[Path]:
    found = sorted((ROOT / room).rglob("*.py"))
    assert found
    return found


def top_level(name: str) -> str:
    """`plait.room` for our own modules, otherwise the distribution's first name."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "plait" else parts[0]


def imports(tree: ast.AST, *, late: bool = True) -> Iterator[str]:
    """The modules that a file imports; without those inside functions and type-checking blocks if not `late`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (top_level(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            yield top_level(node.module or "")
        elif late or not (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            yield from imports(node, late=late)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    allowed = ALLOWED[room] | {f"plait.{room}"}
    for source in sources(room):
        foreign = set(imports(ast.parse(source.read_text()))) - allowed - sys.stdlib_module_names
        assert not foreign, f"{source.relative_to(ROOT)} imports {sorted(foreign)}"


@pytest.mark.parametrize("room", LATE)
def test_heavy_packages_are_imported_only_where_they_are_needed(room: str) -> None:
    for source in sources(room):
        early = set(imports(ast.parse(source.read_text()), late=False)) & LATE[room]
        assert not early, f"{source.relative_to(ROOT)} imports {sorted(early)} at its top"


@pytest.mark.parametrize(
    "module",
    [
        "plait.schemas",
        "plait.service.client",
        "plait.service.cli",
        "plait.engine.api",
        "plait.engine.sim.run",
    ],
)
def test_a_producer_needs_no_torch(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSE_HEAVY_IMPORTS, module], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_the_refusal_of_heavy_imports_refuses() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSE_HEAVY_IMPORTS, "torch"], capture_output=True, text=True
    )
    assert "torch is imported" in done.stderr


def test_transformers_does_not_take_our_kernels_for_the_package_of_that_name() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = (
        "import sys; assert sys.path[0] == '';"
        "from transformers.utils.import_utils import is_kernels_available; sys.exit(is_kernels_available())"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_every_package_and_what_lies_beside_it_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {str(path.parent.relative_to(ROOT)) for room in ROOMS for path in sources(room)}
    assert set(setuptools["package-dir"].values()) == folders
    assert set(setuptools["package-dir"]) == set(setuptools["packages"])
    for package, folder in (("plait.kernels", "kernels"), ("plait.engine.sim", "engine/sim")):
        patterns = setuptools["package-data"][package]
        others = [path for path in (ROOT / folder).iterdir() if path.is_file() and path.suffix != ".py"]
        assert others and all(any(path.match(pattern) for pattern in patterns) for path in others)


def test_no_file_is_too_long_to_read() -> None:
    folders = [ROOT / name for name in (*ROOMS, "tests", "benchmarks", "examples", "deploy")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in CODE]
    assert len(files) > 50
    long = {
        str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > 500
    }
    assert long == {}


def test_the_readme_s_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / "README.md").read_text() + (ROOT / ".ci" / "run").read_text()
    named = set(re.findall(r"(?:^ {4}|`)make ([a-z][a-z-]*)", text, re.MULTILINE)) | set(
        re.findall(r"^step ([a-z]+)$", text, re.MULTILINE)
    )
    assert {"test", "lint", "typecheck"} <= named <= targets


def test_a_clean_checkout_can_run_its_checks() -> None:
    run = ROOT / ".ci" / "run"
    assert run.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(run)]).returncode == 0
    help_text = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    assert "make demo" in help_text
