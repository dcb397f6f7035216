import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from fakes import FakeEngine
from plait.service import local
from plait.service.cli import run

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
WITH_FAKE_ENGINE = """
import sys
from fakes import FakeEngine
from plait.service import local
local.make_engine = lambda settings: FakeEngine(pace={pace}, text_per_token=" ok")
from plait.service.cli import main
main()
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("PLAIT_") and name != "PLAIT_CACHE":
            monkeypatch.delenv(name)


@pytest.fixture
def fake_engine(monkeypatch):
    """Local stacks get engines of this kind; the list holds those made, options can be set before."""
    made, options = [], {"text_per_token": " ok", "ready": False}

    def make(settings):
        made.append(FakeEngine(**options))
        return made[-1]

    monkeypatch.setattr(local, "make_engine", make)
    make.made, make.options = made, options
    return make


def start(*arguments, pace=None, **options):
    """`plait` as a process, with a fake engine when `pace` (seconds per token) is given."""
    program = ["-m", "plait.service.cli"] if pace is None else ["-c", WITH_FAKE_ENGINE.format(pace=pace)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PLAIT_")}
    environment |= {"PYTHONPATH": str(TESTS), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def finish(process, number=None):
    if number is not None:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture
def dev():
    """The address of a broker that `plait dev --no-worker` runs."""
    process = start("dev", "--no-worker")
    yield process.stdout.readline().strip()
    assert finish(process, signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["generate"],
        ["generate", "x", "--priority", "10"],
        ["generate", "x", "--max-tokens", "0"],
        ["generate", "x", "--raw", "--system", "y"],
        ["generate", "  "],
        ["generate", "x", "--temprature", "1"],
        ["cancel", "x"],
        ["cancel", "no spaces", "--bootstrap-servers", "127.0.0.1:1"],
        ["schema", "nonsense"],
        ["demo", "--requests", "0"],
        ["demo", "--no-worker"],
        ["summarize"],
        ["worker", "--config", "missing.toml"],
        ["dev", "--port", "70000"],
        ["topics"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, capsys):
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("plait: ") and error.count("\n") == 1 and "--help)" in error


def test_version_and_help(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == "plait 0.1.0\n"
    for command in ("demo", "dev", "worker", "generate", "summarize", "cancel", "topics", "schema", "doctor"):
        assert run([command, "--help"]) == 0
        assert f"plait {command}" in capsys.readouterr().out


def test_starting_the_command_line_imports_nothing_heavy():
    code = """import sys, plait.service.cli
    heavy = {"torch", "transformers", "aiokafka", "pydantic", "opentelemetry.sdk"} & set(sys.modules)
    sys.exit(", ".join(sorted(heavy)) or 0)"""
    done = subprocess.run(
        [sys.executable, "-c", code.replace("\n    ", "\n")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_client_needs_no_torch():
    code = "import sys, plait.service.client; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", ["request", "event", "control"])
def test_schemas_are_printed(name, capsys):
    assert run(["schema", name]) == 0
    Draft202012Validator.check_schema(json.loads(capsys.readouterr().out))


def test_all_documents_are_printed_or_written(capsys, tmp_path):
    assert run(["schema"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"request", "event", "control", "asyncapi"}
    assert run(["schema", "--out", str(tmp_path / "new")]) == 0
    names = {"request.schema.json", "event.schema.json", "control.schema.json", "asyncapi.json"}
    assert {file.name for file in (tmp_path / "new").iterdir()} == names
    assert json.loads((tmp_path / "new" / "asyncapi.json").read_text())["asyncapi"] == "3.0.0"
    assert run(["schema", "events"]) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_dev_prints_its_address_and_ends_in_order(number):
    process = start("dev", "--no-worker")
    host, port = process.stdout.readline().strip().split(":")
    assert host == "127.0.0.1"
    socket.create_connection((host, int(port)), 5).close()
    code, _, err = finish(process, number)
    assert code == 0 and "Traceback" not in err
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), 5)


def test_dev_with_a_worker_answers_and_a_taken_port_is_one_clear_line(capsys):
    process = start("dev", pace=0.001)
    address = process.stdout.readline().strip()
    try:
        assert run(["generate", "hi", "--max-tokens", "3", "--bootstrap-servers", address]) == 0
        assert capsys.readouterr().out == " ok ok ok\n"
        code, _, err = finish(start("dev", "--no-worker", "--port", address.split(":")[1]))
        assert code == 1 and err.startswith("plait: port ") and err.count("\n") == 1
    finally:
        code, _, err = finish(process, signal.SIGTERM)
    assert code == 0 and "Traceback" not in err


def serving(dev, pace, tokens):
    """A worker, and a request of which it has answered the first token."""
    worker = start("worker", "--bootstrap-servers", dev, "--http-port", "0", pace=pace)
    for line in worker.stderr:
        if "ready:" in line:
            break
    request = start("generate", "hi", "--max-tokens", str(tokens), "--bootstrap-servers", dev)
    assert request.stdout.read(3) == " ok"
    return worker, request


def test_a_worker_finishes_what_runs_at_the_first_signal_and_stops_at_the_second(dev):
    worker, request = serving(dev, pace=0.1, tokens=20)
    code, _, err = finish(worker, signal.SIGTERM)
    assert code == 0 and "Traceback" not in err
    code, out, _ = finish(request)
    assert code == 0 and out == " ok" * 19 + "\n"


def test_a_second_signal_stops_a_worker_at_once(dev):
    worker, request = serving(dev, pace=0.2, tokens=1000)
    worker.send_signal(signal.SIGTERM)
    for line in worker.stderr:
        if "1 requests in flight" in line:
            break
    code, _, err = finish(worker, signal.SIGTERM)
    assert code == 0 and "Traceback" not in err
    code, _, err = finish(request, signal.SIGINT)
    assert code == 130 and "Traceback" not in err


def test_ctrl_c_ends_the_request_before_its_topic_goes(dev):
    worker, request = serving(dev, pace=0.05, tokens=1000)
    code, out, _ = finish(request, signal.SIGINT)
    assert code == 130 and out.endswith("\n")
    code, _, err = finish(worker, signal.SIGTERM)
    assert code == 0 and "0 requests in flight" in err and "Error" not in err


def test_generate_starts_what_it_needs_and_streams(fake_engine, capsys):
    assert run(["generate", "hi", "--max-tokens", "4", "--seed", "7", "--system", "be brief", "-p", "9"]) == 0
    assert capsys.readouterr().out == " ok ok ok ok\n"
    (request,) = fake_engine.made[0].submitted
    assert request.priority == 9 and request.sampling.seed == 7 and len(request.prompt_token_ids) == 5
    assert not fake_engine.made[0].ready


def test_generate_json_raw_and_standard_input(fake_engine, capsys, monkeypatch):
    assert run(["generate", "one two", "--raw", "--json", "--max-tokens", "2", "--stop", "x"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == " ok ok" and answer["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 2 and answer["timing"]["total_ms"] >= 0
    with Path(os.devnull).open() as empty:
        monkeypatch.setattr("sys.stdin", empty)
        assert run(["generate", "-"]) == 2


def test_failures_are_one_line_and_exit_code_1(fake_engine, capsys):
    assert run(["generate", "refuse"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("plait: invalid_request: ") and error.count("\n") == 1
    assert run(["generate", "x", "--bootstrap-servers", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert "127.0.0.1:1" in error and error.count("\n") == 1
    assert run(["cancel", "x", "--bootstrap-servers", "127.0.0.1:1"]) == 1
    assert run(["topics", "--bootstrap-servers", "127.0.0.1:1"]) == 1


def test_generate_asks_given_brokers_for_the_model_that_is_named(dev, capsys):
    assert run(["generate", "x", "-b", dev, "--requests-topic", "nowhere"]) == 1
    error = capsys.readouterr().err
    assert "there is no topic nowhere; a worker makes" in error and error.count("\n") == 1
    worker = start("worker", "-b", dev, "--http-port", "0", "--model", "mine", pace=0.001)
    for line in worker.stderr:
        if "ready:" in line:
            break
    assert run(["generate", "x", "-b", dev, "-n", "2"]) == 0
    assert run(["generate", "x", "-b", dev, "-n", "2", "--model", "mine"]) == 0
    assert run(["generate", "x", "-b", dev, "-n", "2", "--model", "other"]) == 1
    assert "model_not_found: model: other is not served here" in capsys.readouterr().err
    assert finish(worker, signal.SIGTERM)[0] == 0


def test_wrong_settings_are_wrong_usage_and_every_key_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "plait.toml").write_text("[kafka]\ngruop_id = 1\n[engine]\nmax_running = 0\n")
    assert run(["worker", "--config", str(tmp_path / "plait.toml")]) == 2
    error = capsys.readouterr().err
    assert "kafka.gruop_id: unknown key" in error and "engine.max_running" in error and error.count("\n") == 1
    monkeypatch.setenv("PLAIT_KAFKA_SECURITY_PROTOCOL", "nonsense")
    assert run(["topics", "--bootstrap-servers", "127.0.0.1:1"]) == 2
    assert "kafka.security_protocol" in capsys.readouterr().err


def test_a_dead_engine_ends_the_command(fake_engine, capsys):
    fake_engine.options["pace"] = 0.01

    class Dying(FakeEngine):
        def submit(self, request, on_output):
            super().submit(request, on_output)
            self.crash("out of memory")

    local.make_engine = lambda settings: Dying()
    assert run(["generate", "x"]) == 1
    assert "out of memory" in capsys.readouterr().err


def test_debug_shows_where_it_failed(monkeypatch):
    monkeypatch.setenv("PLAIT_DEBUG", "1")
    with pytest.raises(Exception, match="no Kafka broker answers at"):
        run(["cancel", "x", "--bootstrap-servers", "127.0.0.1:1"])


def test_the_demo_streams_eight_requests_and_ends_with_a_table(fake_engine, capsys):
    assert run(["demo", "--max-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert out.count(" ok ok ok ok") >= 8
    table = out.split("\n\n")[-2].splitlines()
    assert table[0].split()[:2] == ["id", "priority"] and len(table) == 9
    assert all(line.split()[-1] == "length" and line.split()[-3] == "12" for line in table[1:])


def test_a_failed_request_fails_the_demo(fake_engine, capsys):
    class Failing(FakeEngine):
        async def start(self):
            await super().start()
            self.fail_next("internal")

    local.make_engine = lambda settings: Failing(ready=False)
    assert run(["demo", "--max-tokens", "3", "--requests", "9"]) == 1
    out = capsys.readouterr().out
    assert "internal" in out and out.count("<length>\n") == 8


def test_topics_are_made_listed_and_removed(dev, capsys):
    assert run(["topics", "-b", dev]) == 0
    assert "no topics of plait" in capsys.readouterr().out
    assert run(["topics", "-b", dev, "--create"]) == 0
    assert "created plait.requests\n" in capsys.readouterr().out
    worker = start("worker", "-b", dev, "--http-port", "0", pace=0.001)
    assert run(["generate", "x", "-b", dev, "--max-tokens", "2"]) == 0
    assert finish(worker, signal.SIGTERM)[0] == 0
    capsys.readouterr()
    assert run(["topics", "-b", dev]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["plait.requests"][:4] == ["requests", "8", "1", "0"] and rows["plait.requests"][-1] == "ago"


def test_expired_response_topics_are_removed_and_empty_ones_stay(dev, capsys):
    import asyncio

    from aiokafka import AIOKafkaProducer
    from aiokafka.admin import NewTopic

    from plait.service.topic_admin import admin

    async def prepare():
        async with admin({"bootstrap_servers": dev}) as client:
            names = ("plait.responses.old", "plait.clients.old", "plait.responses.empty", "other")
            await client.create_topics([NewTopic(name, 1, 1) for name in names])
        async with AIOKafkaProducer(bootstrap_servers=dev) as producer:
            for name in ("plait.responses.old", "plait.clients.old", "other"):
                await producer.send_and_wait(name, b"x", timestamp_ms=1_700_000_000_000)

    asyncio.run(prepare())
    assert run(["topics", "-b", dev, "--remove-expired"]) == 0
    out = capsys.readouterr().out
    assert "removed plait.responses.old\n" in out and "removed plait.clients.old\n" in out
    assert "plait.responses.empty" in out and "other" not in out


def test_the_doctor_finds_nothing_wrong_here_and_names_what_is(dev, capsys):
    assert run(["doctor", "-b", dev]) == 0
    out = capsys.readouterr().out
    assert "ok   broker: " in out and "warn topic plait.requests: is not there" in out
    assert run(["topics", "-b", dev, "--create"]) == 0 and run(["doctor", "-b", dev]) == 0
    assert "ok   message size: plait.requests" in capsys.readouterr().out
    assert run(["doctor", "-b", "127.0.0.1:1"]) == 1
    out = capsys.readouterr().out
    assert "fail broker: no Kafka broker answers at 127.0.0.1:1" in out and "-> check the address" in out


def test_summarize_writes_files_and_reports_those_that_failed(fake_engine, capsys, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "text.txt").write_text("word " * 300)
    (tmp_path / "text.txt").write_text("other words")
    (tmp_path / "bad.bin").write_bytes(b"\xff\xfe")
    files = [tmp_path / "text.txt", tmp_path / "a" / "text.txt", tmp_path / "bad.bin"]
    arguments = ["summarize", *map(str, files), "--chunk-tokens", "100"]
    assert run([*arguments, "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "bad.bin: is not UTF-8" in error and f"{files[0]}: {tmp_path}/out/text.txt.summary.txt\n" in error
    assert {f.name for f in (tmp_path / "out").iterdir()} == {
        "text.txt.summary.txt",
        "text-2.txt.summary.txt",
    }
    assert (tmp_path / "out" / "text.txt.summary.txt").read_text() == "ok " * 24 + "ok\n"
    assert all(request.priority == 1 for request in fake_engine.made[0].submitted)
    assert run([*arguments[:3], "--chunk-tokens", "100"]) == 0
    out = capsys.readouterr().out
    assert f"== {files[0]}\nok ok" in out and f"== {files[1]}\nok ok" in out


def test_summarize_against_given_brokers_needs_no_engine(dev, capsys, tmp_path):
    worker = start("worker", "-b", dev, "--http-port", "0", pace=0.001)
    (tmp_path / "text.txt").write_text("some words")
    model = str(tmp_path / "no-model")
    assert (
        run(["summarize", str(tmp_path / "text.txt"), "-b", dev, "--model", model, "--chunk-tokens", "64"])
        == 0
    )
    captured = capsys.readouterr()
    assert captured.out == "ok " * 15 + "ok\n" and "estimated" in captured.err
    assert finish(worker, signal.SIGTERM)[0] == 0


def test_ctrl_c_reaches_the_whole_terminal_and_still_ends_in_order():
    process = start("generate", "x", "--max-tokens", "1000", pace=0.05, start_new_session=True)
    assert process.stdout.read(3) == " ok"
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130 and "Traceback" not in err and "failed" not in err
