"""What the README promises of the command line, with the real model."""

import json
import os
import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
PLAIT = [sys.executable, "-m", "plait.service.cli"]


def plait(*arguments, **options):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PLAIT_") or k == "PLAIT_CACHE"}
    return subprocess.run(
        [*PLAIT, *arguments], capture_output=True, text=True, timeout=280, env=environment, **options
    )


def test_the_demo_streams_and_ends_with_a_table():
    done = plait("demo", "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    assert "[question p9] The capital of France is Paris." in done.stdout
    table = done.stdout.split("\n\n")[-2].splitlines()
    assert len(table) == 1 + 8
    assert all(line.split()[-1] in ("stop", "length") for line in table[1:])
    assert len({line.split()[1] for line in table[1:]}) == 8


def test_generate_is_repeatable_and_summarize_summarizes(tmp_path):
    dev = subprocess.Popen([*PLAIT, "dev"], stdout=subprocess.PIPE, text=True)
    try:
        address = dev.stdout.readline().strip()
        for line in dev.stdout:
            if line == "ready\n":
                break
        arguments = (
            "generate",
            "Name a colour.",
            "--max-tokens",
            "12",
            "--seed",
            "5",
            "-b",
            address,
            "--json",
        )
        first, second = (json.loads(plait(*arguments).stdout) for _ in range(2))
        assert first["text"] == second["text"] and first["usage"]["completion_tokens"] > 0
        text = "The lighthouse was built in 1874. Its first keeper was Anna Holm. She kept a diary.\n\n"
        (tmp_path / "long.txt").write_text(text * 12)
        (tmp_path / "bad.txt").write_bytes(b"\xff")
        done = plait(
            *("summarize", str(tmp_path / "long.txt"), str(tmp_path / "bad.txt"), "--chunk-tokens", "128"),
            *("--bootstrap-servers", address),
        )
        assert done.returncode == 1 and "bad.txt: is not UTF-8" in done.stderr
        assert "lighthouse" in done.stdout
        assert "plait.requests" in plait("topics", "-b", address).stdout
    finally:
        dev.send_signal(signal.SIGTERM)
        assert dev.wait(60) == 0
