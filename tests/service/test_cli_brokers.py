"""How the commands reach the brokers, and what they keep out of the log."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka.protocol.admin import SaslAuthenticateRequest_v1

from plait.service.cli import run
from plait.service.commands import connect


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    for name in ("aiokafka", "aiokafka.cluster", "aiokafka.conn"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    levels = {name: logging.getLogger(name).level for name in ("aiokafka", "asyncio")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def shown(logger: str, level: int, text: str, *values: Any) -> bool:
    found = logging.getLogger(logger)
    line = found.makeRecord(logger, level, "", 0, text, values, None)
    return found.isEnabledFor(level) and bool(found.filter(line))


def test_a_worker_log_leaves_out_that_response_topics_come_and_go_and_nothing_else(
    untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PLAIT_DEBUG", raising=False)
    connect.quiet()
    assert not shown("asyncio", logging.ERROR, "Task exception was never retrieved")
    connect.log_to_stderr()
    assert shown("asyncio", logging.ERROR, "Task exception was never retrieved")
    assert not shown("aiokafka.cluster", logging.ERROR, "Topic %s not found in cluster metadata", "t")
    assert shown("aiokafka.cluster", logging.ERROR, "Topic %s is not authorized for this client", "t")


def test_a_broker_that_is_away_is_said_now_and_then(untouched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIT_DEBUG", raising=False)
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    connect.log_to_stderr()
    away = ("aiokafka", logging.ERROR, 'Unable connect to "%s:%s": %s')
    assert shown(*away, "one", 1, "refused") and shown(*away, "two", 2, "refused")
    now += connect.BROKER_AWAY_S - 1
    assert not shown(*away, "one", 1, "refused")
    assert shown("aiokafka", logging.ERROR, "something else") and shown(*away, "one", 1, "not authenticated")
    now += 1
    assert shown(*away, "one", 1, "refused")


@pytest.mark.parametrize("configure", [connect.quiet, connect.log_to_stderr])
def test_no_log_shows_a_password(untouched: None, monkeypatch: pytest.MonkeyPatch, configure: Any) -> None:
    monkeypatch.setenv("PLAIT_DEBUG", "1")
    monkeypatch.setattr(logging.getLogger("aiokafka.conn"), "level", logging.DEBUG)
    configure()
    secret = SaslAuthenticateRequest_v1(b"\0user\0secret")
    assert "secret" in str(secret)
    assert not shown("aiokafka.conn", logging.DEBUG, "Request to %s:%d %d: %s", "host", 1, 2, secret)
    assert shown("aiokafka.conn", logging.DEBUG, "Request to %s:%d %d: %s", "host", 1, 2, "MetadataRequest")


@pytest.mark.parametrize(
    "command", [["generate", "x"], ["summarize", __file__], ["cancel", "x"], ["demo", "--no-worker"]]
)
def test_every_command_takes_the_security_settings_of_the_environment(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    class Stop(Exception):
        pass

    def client(_: str, **options: Any) -> None:
        given.update(options)
        raise Stop

    monkeypatch.setattr("plait.service.client.Client", client)
    monkeypatch.setattr("plait.service.token_count.counter", lambda *_: (len, ""))
    monkeypatch.setenv("PLAIT_KAFKA_SECURITY_PROTOCOL", "SASL_PLAINTEXT")
    monkeypatch.setenv("PLAIT_KAFKA_SASL_USERNAME", "someone")
    monkeypatch.setenv("PLAIT_KAFKA_SASL_PASSWORD", "secret")
    assert run([*command, "-b", "127.0.0.1:1"]) == 1
    assert given["kafka"]["security_protocol"] == "SASL_PLAINTEXT"
    assert given["kafka"]["sasl_plain_username"] == "someone"
