"""The examples run, against a broker and a worker of `plait dev` whose engine is a fake one."""

import re
import subprocess
import sys

import pytest
from test_cli import ROOT, finish, start

EXPECTED = {
    "stream.py": r"( ok){60}\n60 tokens, length\n",
    "many.py": r"(\w+: ok( ok){39}\n){6}",
    "plain_kafka.py": r"( ok){40}\n40 tokens, length\n",
    "cancel.py": r"cancelled after \d{1,3} tokens\n",
    "resume.py": r"first reader: ( ok)+\nboth together: ( ok){20}\n",
    "secured.py": r"( ok){10}\n",
    "trace.py": r"[0-9a-f]{32} ( ok){20}\n",
}


@pytest.fixture(scope="module")
def address():
    process = start("dev", pace=0.01)
    line = process.stdout.readline().strip()
    for output in process.stdout:
        if output == "ready\n":
            break
    yield line
    assert finish(process, 15)[0] == 0


def test_every_example_is_run():
    assert {file.name for file in (ROOT / "examples").glob("*.py")} == {*EXPECTED, "engine.py"}


@pytest.mark.model
def test_the_engine_alone():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "engine.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"The capital of France is ->  ?Paris", done.stdout), done.stdout


@pytest.mark.parametrize("name", EXPECTED)
def test_the_example_prints_what_it_says(address, name):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), address], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(EXPECTED[name], done.stdout), done.stdout
