"""docker-compose.yml, the Dockerfile and the collector's configuration, as far as they show without an engine."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from plait.service.cli import app
from plait.service.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
# compose-spec/compose-go, v2.16.2, Apache-2.0.
SCHEMA = json.loads((ROOT / "tests" / "data" / "compose-spec.json").read_text())
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
COLLECTOR = yaml.safe_load((ROOT / "deploy" / "otel-collector.yaml").read_text())
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = [name for name, service in SERVICES.items() if service.get("image") == "plait"]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their arguments, continued lines joined."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def parse(arguments: list[str]) -> dict[str, Any]:
    """The parameters that a `plait` command line means; raises when it is not one."""
    name, *rest = arguments
    command = typer.main.get_command(app).commands[name]
    return command.make_context(name, rest).params


def test_it_is_a_compose_file() -> None:
    jsonschema.validate(COMPOSE, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"services": {"worker": {"imagee": "plait"}}}, SCHEMA)


def test_services_volumes_and_profiles_that_are_named_exist() -> None:
    assert {"kafka", "otel-collector", "jaeger", "worker", "worker-gpu"} == set(SERVICES)
    for service in SERVICES.values():
        for name, need in service.get("depends_on", {}).items():
            assert name in SERVICES
            assert need["condition"] == "service_started" or "healthcheck" in SERVICES[name]
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]
    assert SERVICES["worker-gpu"]["profiles"] == ["gpu"]
    assert not any("profiles" in service for name, service in SERVICES.items() if name != "worker-gpu")


def test_images_are_pinned() -> None:
    foreign = [service["image"] for service in SERVICES.values() if "build" not in service]
    foreign += [argument for name, argument in instructions() if name == "FROM"]
    assert all(re.search(r":\d+\.\d+", image) for image in foreign)


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_is_built_and_started_with_what_exists(name: str) -> None:
    service = SERVICES[name]
    assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    given = {argument.split("=")[0] for instruction, argument in instructions() if instruction == "ARG"}
    assert set(service["build"]["args"]) <= given
    parameters = parse(service["command"])
    assert parameters["bootstrap_servers"] == "kafka:19092"
    assert parameters["http_host"] == "0.0.0.0"


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_s_environment_is_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**SERVICES[name]["environment"]}
    for variable, value in environment.items():
        monkeypatch.setenv(variable, re.sub(r"\$\{\w+:-(.*)\}", r"\1", value))
    settings = Settings.load()
    assert settings.engine.model == "smollm2"
    assert settings.telemetry.otlp_endpoint == "http://otel-collector:4318"
    assert settings.engine.device == ("cuda" if name == "worker-gpu" else "auto")
    assert all(_known(variable) for variable in environment)
    grace = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    assert grace > settings.worker.drain_seconds
    assert f":{settings.http.port}/readyz" in SERVICES[name]["healthcheck"]["test"][-1]


def _known(variable: str) -> bool:
    _, section, key = variable.lower().split("_", 2)
    return key in type(getattr(Settings(), section)).model_fields


def test_a_healthcheck_s_python_compiles() -> None:
    for name in WORKERS:
        program, flag, code = SERVICES[name]["healthcheck"]["test"][1:]
        assert (program, flag) == ("python", "-c")
        compile(code, "healthcheck", "exec")


def test_clients_reach_kafka_at_the_addresses_it_advertises() -> None:
    environment = SERVICES["kafka"]["environment"]
    listeners = {address.split("://")[0]: address for address in environment["KAFKA_LISTENERS"].split(",")}
    advertised = dict(a.split("://") for a in environment["KAFKA_ADVERTISED_LISTENERS"].split(","))
    protocols = dict(p.split(":") for p in environment["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(","))
    assert set(listeners) == set(protocols) == {*advertised, "CONTROLLER"}
    assert advertised == {"INTERNAL": "kafka:19092", "EXTERNAL": "localhost:9092"}
    assert all(listeners[name].endswith(address.split(":")[1]) for name, address in advertised.items())
    assert "127.0.0.1:9092:9092" in SERVICES["kafka"]["ports"]


def test_the_dockerfile_copies_what_exists_and_what_is_not_ignored() -> None:
    kept = set(re.findall(r"(?m)^!(\S+)$", (ROOT / ".dockerignore").read_text()))
    copied = [argument.split()[:-1] for name, argument in instructions() if name == "COPY"]
    for source in [source for sources in copied for source in sources]:
        assert (ROOT / source).exists() and source in kept
    assert {"schemas", "engine", "kernels", "service"} <= kept


def test_the_image_starts_a_worker() -> None:
    last = dict(instructions())
    command = [*json.loads(last["ENTRYPOINT"]), *json.loads(last["CMD"])]
    assert command[0] == "plait"
    assert parse(command[1:])["bootstrap_servers"] is None
    cache = re.search(r"PLAIT_CACHE=(\S+)", DOCKERFILE)
    assert cache and cache[1] == last["VOLUME"]
    assert all(f"models:{cache[1]}" in SERVICES[name]["volumes"] for name in WORKERS)


def test_the_collector_s_pipelines_use_what_is_defined() -> None:
    for pipeline in COLLECTOR["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert pipeline[kind] and set(pipeline[kind]) <= set(COLLECTOR[kind])
    endpoints = [protocol["endpoint"] for protocol in COLLECTOR["receivers"]["otlp"]["protocols"].values()]
    published = {port.rpartition(":")[2] for port in SERVICES["otel-collector"]["ports"]}
    assert {endpoint.rpartition(":")[2] for endpoint in endpoints} == published
    for exporter in COLLECTOR["exporters"].values():
        assert exporter["endpoint"].partition(":")[0] in SERVICES
    mounted = shlex.split(" ".join(SERVICES["otel-collector"]["command"]))[1]
    assert any(f":{mounted}:" in volume for volume in SERVICES["otel-collector"]["volumes"])
