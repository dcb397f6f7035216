"""File, environment, flags: in rising precedence, and unknown keys are named."""

from pathlib import Path

import pytest

from plait.service.settings import Settings, SettingsError

TOML = """
[kafka]
bootstrap_servers = "file:1"
group_id = "from-file"
client_id = "from-file"
[engine]
max_running = 3
"""


def write(path: Path, text: str) -> Path:
    file = path / "plait.toml"
    file.write_text(text)
    return file


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_KAFKA_GROUP_ID", "from-env")
    monkeypatch.setenv("PLAIT_KAFKA_CLIENT_ID", "from-env")
    monkeypatch.setenv("PLAIT_ENGINE_BLOCK_SIZE", "32")
    settings = Settings.load(write(tmp_path, TOML), kafka={"client_id": "from-flag"})
    assert settings.kafka.bootstrap_servers == "file:1"
    assert settings.kafka.group_id == "from-env"
    assert settings.kafka.client_id == "from-flag"
    assert settings.engine.max_running == 3
    assert settings.engine.block_size == 32
    assert settings.worker == Settings.load().worker


def test_lists_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_WORKER_MODEL_ALIASES", '["a", "b"]')
    assert Settings.load().worker.model_aliases == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[kafka]\nbootstrap_server = 'x'", "kafka.bootstrap_server: unknown key"),
        ("[kafak]\ngroup_id = 'x'", "kafak: unknown key"),
        ("[worker]\nmax_in_flight = 0", "worker.max_in_flight"),
        ("[engine]\npolicy = 'random'", "engine.policy: Input should be 'default', 'fcfs'"),
        ("[engine]\ndevice = 'gpu'", "engine.device: .*auto.cpu.cuda"),
        ("[worker\n", "plait.toml"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        Settings.load(write(tmp_path, text))


def test_unknown_key_in_a_section_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_KAFKA_GRUOP_ID", "x")
    with pytest.raises(SettingsError, match=r"kafka\.gruop_id: unknown key"):
        Settings.load()


def test_missing_file() -> None:
    with pytest.raises(SettingsError, match="no such file"):
        Settings.load("absent.toml")


def test_own_topics_must_differ() -> None:
    with pytest.raises(SettingsError, match="three topics"):
        Settings.load(topics={"dlq": "plait.requests"})


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_KAFKA_SASL_PASSWORD", "hunter2")
    settings = Settings.load()
    assert settings.kafka.sasl_password is not None
    assert settings.kafka.sasl_password.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in settings.model_dump_json()


def test_the_engine_section_is_the_engines_configuration() -> None:
    from dataclasses import asdict

    from plait.engine.config import EngineConfig

    known = asdict(EngineConfig())
    del known["vocab_size"]  # the tokenizer's, not the user's
    del known["max_restarts"]  # from worker.max_attempts
    assert Settings.load().engine.model_dump() == known
    config = Settings.load(engine={"max_running": 5}).engine.to_config(max_attempts=3)
    assert config.max_running == 5 and config.max_restarts == 2
