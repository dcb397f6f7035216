"""Bearer tokens: shared, renewed in time, and never in a message."""

import asyncio
import traceback

import pytest
from aiokafka.errors import KafkaConnectionError

from plait.service import oauth
from plait.service.kafka import connection
from plait.service.oauth import Tokens, make_tokens
from plait.service.settings import KafkaSettings, SettingsError

SASL = {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}


async def test_a_token_is_kept_until_it_is_nearly_over() -> None:
    now, made = [0.0], []

    async def fetch() -> tuple[str, float]:
        await asyncio.sleep(0)
        made.append(f"token-{len(made)}")
        return made[-1], 100

    tokens = Tokens(fetch, clock=lambda: now[0])
    assert await asyncio.gather(*(tokens.token() for _ in range(5))) == ["token-0"] * 5
    now[0] = 79
    assert await tokens.token() == "token-0"
    now[0] = 80
    assert await tokens.token() == "token-1"


async def test_a_failure_says_neither_secret_nor_answer_and_is_tried_again() -> None:
    failures: list[Exception] = [ValueError("client_secret=hunter2")]

    async def fetch() -> tuple[str, float]:
        if failures:
            raise failures.pop()
        return "token", 100

    tokens = Tokens(fetch)
    with pytest.raises(KafkaConnectionError, match="no OAuth token: ValueError") as failed:
        await tokens.token()
    assert "hunter2" not in "".join(traceback.format_exception(failed.value))
    assert await tokens.token() == "token"


async def test_an_endpoint_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oauth, "TIMEOUT_S", 0.01)

    async def fetch() -> tuple[str, float]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(KafkaConnectionError, match=r"within 0\.01 s"):
        await Tokens(fetch).token()


def plain() -> str:
    return "plain"


async def with_life() -> tuple[str, float]:
    return "async", 60.0


@pytest.mark.parametrize(("name", "token"), [("plain", "plain"), ("with_life", "async")])
async def test_a_callable_of_the_user_s(name: str, token: str) -> None:
    settings = KafkaSettings(**SASL, sasl_oauthbearer_provider=f"test_oauth:{name}")  # type: ignore[arg-type]
    assert await make_tokens(settings).token() == token
    options = connection(settings, "a")
    assert options["sasl_oauth_token_provider"] is connection(settings, "b")["sasl_oauth_token_provider"]
    assert "sasl_plain_password" not in options


@pytest.mark.parametrize("path", ["no_such_module:f", "test_oauth:no_such_function"])
def test_a_callable_that_is_not_there(path: str) -> None:
    settings = KafkaSettings(**SASL, sasl_oauthbearer_provider=path)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"kafka\.sasl_oauthbearer_provider: " + path):
        make_tokens(settings)
