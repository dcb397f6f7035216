"""TLS, client certificates and SASL against Apache Kafka, for worker, client and command line."""

import asyncio
import base64
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from fakes import FakeEngine
from kafka_broker import KafkaBroker
from kafka_secure import KEY_PASSWORD, PASSWORDS, USER, Secure
from plait.service.client import Client
from plait.service.kafka import connection
from plait.service.settings import Settings
from plait.service.worker import Worker, WorkerFailed
from worker_harness import Site

pytestmark = pytest.mark.kafka

CLIENT_SECRET = "oauth-secret-5772"
PLAIN = {"sasl_mechanism": "PLAIN", "sasl_username": "u", "sasl_password": "p"}


@pytest.fixture
def secure(kafka: KafkaBroker) -> Secure:
    assert kafka.secure is not None
    return kafka.secure


def with_certificate(secure: Secure) -> dict[str, Any]:
    return {
        "bootstrap_servers": secure.tls_servers,
        "security_protocol": "SSL",
        "ssl_cafile": str(secure.ca),
        "ssl_certfile": str(secure.certificate),
        "ssl_keyfile": str(secure.key),
        "ssl_password": KEY_PASSWORD,
    }


def with_password(secure: Secure, mechanism: str) -> dict[str, Any]:
    return {
        "bootstrap_servers": secure.sasl_servers,
        "security_protocol": "SASL_SSL",
        "ssl_cafile": str(secure.ca),
        "sasl_mechanism": mechanism,
        "sasl_username": USER,
        "sasl_password": PASSWORDS[mechanism],
    }


def with_token(secure: Secure, endpoint: str, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap_servers": secure.sasl_servers,
        "security_protocol": "SASL_SSL",
        "ssl_cafile": str(secure.ca),
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauthbearer_token_endpoint_url": endpoint,
        "sasl_oauthbearer_client_id": "worker",
        "sasl_oauthbearer_client_secret": CLIENT_SECRET,
        **more,
    }


def unsecured_token(life_s: float = 600) -> str:
    """A JSON Web Token that a broker in its test configuration takes (RFC 7515, "alg": "none")."""
    now = time.time()
    parts = ({"alg": "none"}, {"sub": USER, "iat": now, "exp": now + life_s})
    encoded = [base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=").decode() for p in parts]
    return ".".join([*encoded, ""])


@asynccontextmanager
async def token_endpoint(asked: list[Any]) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        form = await request.post()
        asked.append((request.headers["Authorization"], dict(form)))
        if CLIENT_SECRET not in base64.b64decode(request.headers["Authorization"].split()[1]).decode():
            return web.json_response({"error_description": f"not {CLIENT_SECRET}"}, status=401)
        return web.json_response({"access_token": unsecured_token(), "expires_in": 600})

    app = web.Application()
    app.router.add_post("/token", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/token"
    finally:
        await runner.cleanup()


async def ask_over(kafka: dict[str, Any]) -> None:
    """A worker and a client of the same configuration answer and get an answer."""
    site = Site(kafka["bootstrap_servers"], kafka=kafka)
    async with (
        site.worker(FakeEngine()),
        Client(
            site.bootstrap_servers,
            requests_topic=site.topics.requests,
            control_topic=site.topics.control,
            kafka=connection(site.settings.kafka, "client"),
        ) as client,
    ):
        result = await client.generate("over a secured line", max_tokens=4, timeout_s=60)
        assert result.usage.completion_tokens == 4


async def test_a_client_certificate(secure: Secure) -> None:
    await ask_over(with_certificate(secure))


@pytest.mark.parametrize("mechanism", list(PASSWORDS))
async def test_a_password(kafka: KafkaBroker, secure: Secure, mechanism: str) -> None:
    await asyncio.to_thread(secure.make_users, kafka.bootstrap_servers)
    await ask_over(with_password(secure, mechanism))


async def test_tokens_of_an_endpoint(secure: Secure) -> None:
    asked: list[Any] = []
    async with token_endpoint(asked) as endpoint:
        await ask_over(with_token(secure, endpoint, sasl_oauthbearer_scope="kafka"))
    assert len(asked) == 1, "all clients of a configuration share a token"
    assert asked[0][1] == {"grant_type": "client_credentials", "scope": "kafka"}


async def test_tokens_of_a_callable(secure: Secure) -> None:
    kafka = with_token(secure, "", sasl_oauthbearer_provider="test_security:unsecured_token")
    del kafka["sasl_oauthbearer_client_secret"]
    await ask_over(kafka)


def wrong(secure: Secure, endpoint: str) -> dict[str, dict[str, Any]]:
    return {
        "password": with_password(secure, "SCRAM-SHA-512") | {"sasl_password": "wrong-pass-8888"},
        "plain": with_password(secure, "PLAIN") | {"sasl_password": "wrong-pass-8888"},
        "token": with_token(secure, endpoint) | {"sasl_oauthbearer_client_secret": "wrong-pass-8888"},
        "no endpoint": with_token(secure, "http://127.0.0.1:1/token"),
        "key": with_certificate(secure) | {"ssl_password": "wrong-pass-8888"},
        "no certificate": with_certificate(secure) | {"ssl_certfile": None, "ssl_keyfile": None},
        "authority": with_password(secure, "PLAIN")
        | {"ssl_cafile": None, "sasl_password": "wrong-pass-8888"},
        "name": with_certificate(secure)
        | {"bootstrap_servers": secure.tls_servers.replace("127.0.0.1", "127.0.0.2")},
    }


async def test_no_secret_is_in_what_a_failing_worker_says(
    kafka: KafkaBroker, secure: Secure, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    await asyncio.to_thread(secure.make_users, kafka.bootstrap_servers)
    caplog.set_level(logging.DEBUG, "plait")
    caplog.set_level(logging.INFO, "aiokafka")
    said = []
    async with token_endpoint([]) as endpoint:
        for name, section in wrong(secure, endpoint).items():
            settings = Settings.load(kafka=section | {"connect_timeout_s": 0.3}, http={"port": 0})
            with pytest.raises((WorkerFailed, ValueError)) as failure:
                await Worker(settings, FakeEngine()).run()
            said += [f"{name}: {failure.value}", repr(settings), settings.model_dump_json()]
            said.append(repr(failure.value.__cause__))
    everything = "\n".join([*said, caplog.text, *capfd.readouterr()])
    secrets = ["wrong-pass", CLIENT_SECRET, KEY_PASSWORD, *PASSWORDS.values()]
    assert [secret for secret in secrets if secret in everything] == []
    assert "HTTP 401" in everything and "kafka.ssl_cafile" in everything


async def test_the_command_line_reads_the_same_settings_and_says_no_secret(
    kafka: KafkaBroker, secure: Secure
) -> None:
    await asyncio.to_thread(secure.make_users, kafka.bootstrap_servers)

    def run(password: str, *, debug: bool) -> subprocess.CompletedProcess[str]:
        section = with_password(secure, "SCRAM-SHA-256") | {"sasl_password": password}
        env = {f"PLAIT_KAFKA_{key.upper()}": value for key, value in section.items()}
        command = [sys.executable, "-m", "plait.service.cli", "topics"]
        return subprocess.run(
            command,
            env=os.environ | env | ({"PLAIT_DEBUG": "1"} if debug else {}),
            capture_output=True,
            text=True,
            timeout=60,
        )

    good = await asyncio.to_thread(run, PASSWORDS["SCRAM-SHA-256"], debug=False)
    assert good.returncode == 0, good.stderr
    bad = await asyncio.to_thread(run, "wrong-pass-8888", debug=True)
    assert bad.returncode != 0
    text = bad.stdout + bad.stderr
    assert "Authentication failed" in text and "wrong-pass" not in text


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"sasl_mechanism": "PLAIN", "sasl_username": "u"}, "PLAIN needs kafka.sasl_password"),
        ({"sasl_mechanism": "OAUTHBEARER"}, "OAUTHBEARER needs kafka.sasl_oauthbearer_token_endpoint_url"),
        (
            {"ssl_keyfile": "x", **PLAIN},
            "certfile",
        ),
        ({"sasl_oauthbearer_token_endpoint_url": "http://a:b@c", **PLAIN}, "must hold no credentials"),
    ],
)
def test_what_is_missing_is_named(section: dict[str, str], why: str) -> None:
    from plait.service.settings import SettingsError

    with pytest.raises(SettingsError, match=why):
        Settings.load(kafka={"security_protocol": "SASL_SSL", **section})
