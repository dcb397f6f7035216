"""Prompts by reference (the claim check of enterprise integration patterns): fetched with distrust."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import socket
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from plait.schemas import PromptRef
from plait.service.settings import ClaimSettings

CHUNK = 64 * 1024
TRY_LATER = (408, 425, 429)


class ClaimRefused(Exception):
    """The reference, or what it leads to, is wrong: it will be wrong the next time."""


class ClaimFailed(Exception):
    """The store did not deliver; it may the next time."""


class Claims:
    """Fetches what requests refer to. A sender chooses the URL, so it could make the worker read what only the worker
    can reach (server-side request forgery): the host must be allowed by name, and have a public address at the moment
    of connecting; redirects and proxies are not followed; nothing but the announced bytes is read."""

    def __init__(self, settings: ClaimSettings, resolver: AbstractResolver | None = None) -> None:
        self._settings = settings
        self._resolver = resolver
        self._turns = asyncio.Semaphore(settings.max_concurrent)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def fetch(self, ref: PromptRef) -> str:
        """The prompt. Raises ClaimRefused, whose text begins with the field at fault, and ClaimFailed. Of the URL
        they hold the host alone."""
        url = self._check(ref)
        try:
            async with self._turns, asyncio.timeout(self._settings.timeout_s):
                content = await self._read(url, ref.size)
        except TimeoutError:
            raise ClaimFailed(f"{url.host} took longer than {self._settings.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if (refused := _refusal_in(error)) is not None:
                raise refused from None
            raise ClaimFailed(f"{url.host}: {type(error).__name__}") from None
        if hashlib.sha256(content).hexdigest() != ref.sha256:
            raise ClaimRefused("sha256: is not that of the content")
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise ClaimRefused("url: the content is not UTF-8 text") from None

    def _check(self, ref: PromptRef) -> URL:
        settings = self._settings
        if not settings.hosts:
            raise ClaimRefused("url: this worker takes no prompts by reference (claims.hosts)")
        if ref.size > settings.max_bytes:
            raise ClaimRefused(
                f"size: {ref.size} bytes is over the limit of {settings.max_bytes} (claims.max_bytes)"
            )
        try:
            url = URL(ref.url)
            host, port = url.host, url.port
        except ValueError:
            raise ClaimRefused("url: is no URL") from None
        if url.scheme not in settings.schemes:
            raise ClaimRefused(f"url: its scheme must be {' or '.join(settings.schemes)}")
        if not host or url.user is not None or url.password is not None:
            raise ClaimRefused("url: must name a host, and no user")
        where = host if url.is_default_port() else f"{host}:{port}"
        if not any(_matches(where, allowed.lower()) for allowed in settings.hosts):
            raise ClaimRefused(f"url: {where} is not a host that this worker fetches from (claims.hosts)")
        # An address instead of a name never meets the resolver.
        if not settings.allow_private and _is_private(host):
            raise ClaimRefused(f"url: {host} is a private address (claims.allow_private)")
        return url

    async def _read(self, url: URL, size: int) -> bytes:
        if self._session is None:
            resolver = self._resolver or ThreadedResolver()
            if not self._settings.allow_private:
                resolver = PublicOnly(resolver)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False),
                auto_decompress=False,  # a small answer must not become a large one
                headers={"Accept-Encoding": "identity", "User-Agent": "plait"},
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                text = f"{url.host} answers HTTP {response.status}"
                if response.status >= 500 or response.status in TRY_LATER:
                    raise ClaimFailed(text)
                raise ClaimRefused(
                    f"url: {text}" + ("; redirects are not followed" if response.status < 400 else "")
                )
            if response.content_length not in (None, size):
                raise ClaimRefused(f"size: the content has {response.content_length} bytes, not {size}")
            content = bytearray()
            async for chunk in response.content.iter_chunked(CHUNK):
                content += chunk
                if len(content) > size:
                    raise ClaimRefused(f"size: the content has more than {size} bytes")
        if len(content) < size:
            raise ClaimRefused(f"size: the content has {len(content)} bytes, not {size}")
        return bytes(content)


class PublicOnly(AbstractResolver):
    """Refuses names with a private address. The connection is made to what this returns, so that a name cannot have
    another address a moment later (DNS rebinding)."""

    def __init__(self, inner: AbstractResolver) -> None:
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        if any(_is_private(result["host"]) for result in found):
            raise _PrivateAddress(ClaimRefused(f"url: {host} has a private address (claims.allow_private)"))
        return found

    async def close(self) -> None:
        await self._inner.close()


class _PrivateAddress(OSError):
    """Carries the refusal through aiohttp, which takes an OSError of its resolver for a failure to connect."""

    def __init__(self, refused: ClaimRefused) -> None:
        super().__init__(0, str(refused))
        self.refused = refused


def _refusal_in(error: BaseException | None) -> ClaimRefused | None:
    while error is not None:
        if isinstance(error, _PrivateAddress):
            return error.refused
        error = error.__cause__ or error.__context__
    return None


def _matches(where: str, allowed: str) -> bool:
    if allowed.startswith("*."):
        return where.endswith(allowed[1:]) and len(where) > len(allowed) - 1
    return where == allowed


def _is_private(host: str) -> bool:
    """Whether this is an address, and not one of the public internet; IPv4 inside of IPv6 is looked at too."""
    try:
        address: Any = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
        if inner:
            address = inner
        elif address in NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return not address.is_global or address.is_multicast


NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
