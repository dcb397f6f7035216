"""Bearer tokens for SASL/OAUTHBEARER (RFC 7628): by OAuth's client credentials, or from a callable of the user's."""

from __future__ import annotations

import asyncio
import base64
import importlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import aiohttp
from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaConnectionError

from plait.service.settings import KafkaSettings, SettingsError

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
REFRESH_AT = 0.8  # of a token's life: a connection that is made later must not bring one that is about to end
DEFAULT_LIFE_S = 300.0  # where nobody says how long a token lives

# A token, and how many seconds it lives.
Fetch = Callable[[], Awaitable[tuple[str, float]]]


class Tokens(AbstractTokenProvider):  # type: ignore[misc]
    """Keeps a token until it is nearly over; all clients of one configuration share it.

    A failure to get one is a KafkaConnectionError, so that it is tried again like a broker that is away. No
    message holds a token, a secret or what the endpoint answered.
    """

    def __init__(self, fetch: Fetch, clock: Callable[[], float] = time.monotonic) -> None:
        self._fetch = fetch
        self._clock = clock
        self._lock = asyncio.Lock()
        self._token = ""
        self._until = float("-inf")

    async def token(self) -> str:
        async with self._lock:
            if self._clock() >= self._until:
                try:
                    async with asyncio.timeout(TIMEOUT_S):
                        token, life = await self._fetch()
                except TimeoutError:
                    raise KafkaConnectionError(f"no OAuth token within {TIMEOUT_S:g} s") from None
                except KafkaConnectionError:
                    raise
                except Exception as error:
                    # Not chained, and by its kind alone: the text of a foreign error may hold a secret.
                    raise KafkaConnectionError(f"no OAuth token: {type(error).__name__}") from None
                self._token, self._until = token, self._clock() + life * REFRESH_AT
            return self._token


def make_tokens(settings: KafkaSettings) -> Tokens:
    """The token provider that the settings ask for. Raises SettingsError."""
    if settings.sasl_oauthbearer_provider is not None:
        return Tokens(_of_callable(settings.sasl_oauthbearer_provider))
    return Tokens(_client_credentials(settings))


def _client_credentials(settings: KafkaSettings) -> Fetch:
    """RFC 6749, 4.4; id and secret go into the Authorization header (2.3.1)."""
    url = settings.sasl_oauthbearer_token_endpoint_url or ""
    client_id = settings.sasl_oauthbearer_client_id or ""
    secret = settings.sasl_oauthbearer_client_secret
    pair = ":".join(quote(part, safe="") for part in (client_id, secret.get_secret_value() if secret else ""))
    basic = base64.b64encode(pair.encode()).decode()
    form = {"grant_type": "client_credentials"}
    if settings.sasl_oauthbearer_scope:
        form["scope"] = settings.sasl_oauthbearer_scope

    async def fetch() -> tuple[str, float]:
        connector = aiohttp.TCPConnector(ssl=_trust(settings))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(
                url, data=form, headers={"Authorization": f"Basic {basic}"}, allow_redirects=False
            ) as response,
        ):
            if response.status != 200:
                raise KafkaConnectionError(f"no OAuth token: the endpoint answers HTTP {response.status}")
            answer = await response.json(content_type=None)
        token = answer.get("access_token") if isinstance(answer, dict) else None
        if not isinstance(token, str) or not token:
            raise KafkaConnectionError("no OAuth token: there is no access_token in the endpoint's answer")
        return token, float(answer.get("expires_in") or DEFAULT_LIFE_S)

    return fetch


def _trust(settings: KafkaSettings) -> Any:
    from aiokafka.helpers import create_ssl_context

    file = settings.sasl_oauthbearer_cafile
    return create_ssl_context(cafile=str(file)) if file else True


def _of_callable(path: str) -> Fetch:
    """`module:callable`, plain or async, without arguments: it returns the token, or token and life in seconds."""
    module, _, name = path.partition(":")
    try:
        provide = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"kafka.sasl_oauthbearer_provider: {path}: {error}") from None

    async def fetch() -> tuple[str, float]:
        if inspect.iscoroutinefunction(provide):
            given = await provide()
        else:
            given = await asyncio.to_thread(provide)
        token, life = given if isinstance(given, tuple) else (given, DEFAULT_LIFE_S)
        return str(token), float(life)

    return fetch
