"""Prompts by reference, from a store that does all it should not."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from plait.schemas import PromptRef
from plait.service.claims import ClaimFailed, ClaimRefused, Claims, _is_private
from plait.service.settings import ClaimSettings, Settings
from service_bench import Bench, until

TEXT = "Zöpfe aus drei Strängen. " * 400
GOOD = TEXT.encode()


@dataclass
class Store:
    """`/good` holds GOOD; the others misbehave. `seen` are the requests' headers."""

    port: int = 0
    seen: list[Any] = field(default_factory=list)
    asked: int = 0
    holding: asyncio.Event = field(default_factory=asyncio.Event)

    def url(self, path: str, host: str = "store.test") -> str:
        return f"http://{host}:{self.port}/{path}?signature=s3cr3t"

    def ref(self, path: str, content: bytes = GOOD, **changes: Any) -> PromptRef:
        fields = {"url": self.url(path), "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        return PromptRef(**fields | changes)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        self.seen.append(dict(request.headers))
        path = request.path[1:]
        if path.isdigit():
            return web.Response(status=int(path), headers={"Location": self.url("good")})
        if path == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            try:
                while True:
                    await response.write(b"x" * 65536)
            except ConnectionError:
                return response
        if path == "slow":
            await self.holding.wait()
        body = {
            "zipped": b"\x1f\x8b\x08" + GOOD,
            "latin": "Zöpfe".encode("latin-1"),
            "other": b"?" * len(GOOD),
        }
        headers = {"Content-Encoding": "gzip"} if path == "zipped" else {}
        return web.Response(body=body.get(path, GOOD), headers=headers)


class Names(AbstractResolver):
    """Every name is at these addresses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[ResolveResult]:
        self.asked.append(host)
        return [
            ResolveResult(hostname=host, host=address, port=port, family=2, proto=0, flags=0)
            for address in self.addresses
        ]

    async def close(self) -> None:
        pass


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    made = Store()
    app = web.Application()
    app.router.add_get("/{path}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.port = runner.addresses[0][1]
    yield made
    made.holding.set()
    await runner.cleanup()


def settings(store: Store, **more: Any) -> ClaimSettings:
    given = {"hosts": [f"store.test:{store.port}"], "schemes": ["http"], "allow_private": True}
    return ClaimSettings(**given | more)


async def fetch(store: Store, ref: PromptRef, *addresses: str, **more: Any) -> str:
    claims = Claims(settings(store, **more), Names(*(addresses or ("127.0.0.1",))))
    try:
        return await claims.fetch(ref)
    finally:
        await claims.close()


async def test_a_prompt_is_fetched(store: Store) -> None:
    assert await fetch(store, store.ref("good")) == TEXT
    assert store.seen[0]["Accept-Encoding"] == "identity" and "Cookie" not in store.seen[0]


@pytest.mark.parametrize(
    ("path", "changes", "why"),
    [
        ("good", {"sha256": "0" * 64}, "sha256: is not that of the content"),
        ("other", {}, "sha256"),
        ("good", {"size": len(GOOD) + 1}, f"size: the content has {len(GOOD)} bytes, not {len(GOOD) + 1}"),
        ("good", {"size": len(GOOD) - 1}, "size"),
        ("endless", {}, f"size: the content has more than {len(GOOD)} bytes"),
        ("good", {"size": 16 * 1024 * 1024 + 1}, r"claims\.max_bytes"),
        ("302", {}, "HTTP 302; redirects are not followed"),
        ("307", {}, "redirects are not followed"),
        ("404", {}, "url: store.test answers HTTP 404$"),
        ("403", {}, "HTTP 403"),
    ],
)
async def test_what_is_wrong_for_good(store: Store, path: str, changes: Any, why: str) -> None:
    with pytest.raises(ClaimRefused, match=why) as refused:
        await fetch(store, store.ref(path, **changes))
    assert "s3cr3t" not in str(refused.value) and store.asked <= 1


async def test_content_is_taken_as_it_comes(store: Store) -> None:
    zipped = b"\x1f\x8b\x08" + GOOD
    with pytest.raises(ClaimRefused, match="UTF-8"):
        await fetch(store, store.ref("zipped", zipped))
    with pytest.raises(ClaimRefused, match="UTF-8"):
        await fetch(store, store.ref("latin", "Zöpfe".encode("latin-1")))


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test:{port}/good",
        "http://store.test/good",
        "http://store.test.evil.test:{port}/good",
        "http://evil-store.test:{port}/good",
        "http://store.test@evil.test:{port}/good",
        "http://user:pw@store.test:{port}/good",
        "https://store.test:{port}/good",
        "file:///etc/passwd",
        "gopher://store.test:{port}/good",
        "http://127.0.0.1:{port}/good",
        "http://[::1]:{port}/good",
        "http://2130706433:{port}/good",
        "http://store.test:99999/good",
    ],
)
async def test_only_what_is_allowed_is_asked(store: Store, url: str) -> None:
    with pytest.raises(ClaimRefused, match=r"^url"):
        await fetch(store, store.ref("good", url=url.format(port=store.port)))
    assert store.asked == 0


async def test_names_below_a_name(store: Store) -> None:
    hosts = [f"*.test:{store.port}"]
    assert await fetch(store, store.ref("good"), hosts=hosts) == TEXT
    with pytest.raises(ClaimRefused, match="not a host"):
        await fetch(store, store.ref("good", url=f"http://test:{store.port}/good"), hosts=hosts)
    upper = store.url("good", "STORE.Test")
    assert await fetch(store, store.ref("good", url=upper)) == TEXT


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "::ffff:10.0.0.1", "fd00::1"]
)
async def test_an_allowed_name_with_a_private_address(store: Store, address: str) -> None:
    for addresses in ((address,), ("93.184.216.34", address)):
        with pytest.raises(ClaimRefused, match="private address"):
            await fetch(store, store.ref("good"), *addresses, allow_private=False)
    assert store.asked == 0


async def test_an_allowed_private_address_needs_the_other_permission_too(store: Store) -> None:
    hosts = [f"127.0.0.1:{store.port}"]
    ref = store.ref("good", url=store.url("good", "127.0.0.1"))
    with pytest.raises(ClaimRefused, match="private address"):
        await fetch(store, ref, hosts=hosts, allow_private=False)
    assert await fetch(store, ref, hosts=hosts) == TEXT


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("8.8.8.8", False),
        ("2606:4700::1111", False),
        ("0.0.0.0", True),
        ("100.64.0.1", True),
        ("192.168.1.1", True),
        ("224.0.0.1", True),
        ("fe80::1%eth0", True),
        ("64:ff9b::a00:1", True),
        ("64:ff9b::808:808", False),
        ("2002:a00:1::", True),
        ("store.test", False),
    ],
)
def test_private_addresses(address: str, private: bool) -> None:
    assert _is_private(address) is private


@pytest.mark.parametrize("path", ["500", "503", "429", "408"])
async def test_a_store_that_fails_may_do_better_later(store: Store, path: str) -> None:
    with pytest.raises(ClaimFailed, match=f"HTTP {path}"):
        await fetch(store, store.ref(path))


async def test_a_store_that_is_away_or_slow(store: Store) -> None:
    with pytest.raises(ClaimFailed, match=r"longer than 0\.05 s"):
        await fetch(store, store.ref("slow"), timeout_s=0.05)
    gone = store.ref("good", url="http://store.test:1/x")
    with pytest.raises(ClaimFailed, match=r"store\.test: ") as failed:
        await fetch(store, gone, hosts=["store.test:1"])
    assert "s3cr3t" not in str(failed.value)


async def test_fetches_at_a_time_are_bounded(store: Store) -> None:
    claims = Claims(settings(store, max_concurrent=2), Names("127.0.0.1"))
    tasks = [asyncio.create_task(claims.fetch(store.ref("slow"))) for _ in range(5)]
    await until(lambda: store.asked == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert store.asked == 2
    store.holding.set()
    assert await asyncio.gather(*tasks) == [TEXT] * 5
    await claims.close()


def bench_of(store: Store, **more: Any) -> Bench:
    bench = Bench(settings=Settings.load(claims=settings(store, **more).model_dump()))
    bench.services.admission._claims._resolver = Names("127.0.0.1")
    return bench


def body(store: Store, path: str, **changes: Any) -> bytes:
    from plait.schemas import Request, encode

    return encode(Request(request_id="r", prompt_ref=store.ref(path, **changes)))


async def test_a_request_with_a_reference_is_served(store: Store) -> None:
    bench = bench_of(store)
    *_, done = await bench.serve(body(store, "good"))
    await bench.services.admission._claims.close()
    assert done.type == "done"
    assert bench.engine.submitted[0].prompt_token_ids == bench.engine.tokenizer.encode(TEXT)


@pytest.mark.parametrize(
    ("path", "code", "retryable"), [("404", "invalid_request", False), ("503", "internal", True)]
)
async def test_every_failure_is_one_terminal_event(
    store: Store, path: str, code: str, retryable: bool
) -> None:
    bench = bench_of(store)
    (error,) = await bench.serve(body(store, path))
    await bench.services.admission._claims.close()
    assert error.type == "error" and (error.code, error.retryable) == (code, retryable)
    assert error.message.startswith("prompt_ref") and bench.engine.submitted == []


async def test_no_reference_is_followed_unless_that_is_configured(store: Store) -> None:
    bench = Bench()
    (error,) = await bench.serve(body(store, "good"))
    assert error.type == "error" and "claims.hosts" in error.message and store.asked == 0


@pytest.mark.parametrize("how", ["cancel", "revoke", "deadline"])
async def test_a_request_that_ends_while_its_prompt_is_fetched(store: Store, how: str) -> None:
    from plait.schemas import Request, encode

    bench = bench_of(store)
    slo = {"deadline_ms": 400} if how == "deadline" else {}
    stream = bench.start(encode(Request(request_id="r", prompt_ref=store.ref("slow"), slo=slo)))
    await until(lambda: store.asked == 1)
    if how != "deadline":
        getattr(stream, how)()
    async with asyncio.timeout(10):
        assert stream.task is not None
        await asyncio.wait([stream.task])
    ends = [(e.type, getattr(e, "finish_reason", None) or getattr(e, "code", None)) for e in bench.events()]
    expected = {"cancel": [("done", "cancelled")], "revoke": [], "deadline": [("error", "deadline_exceeded")]}
    assert ends == expected[how] and bench.engine.submitted == []
    assert len(bench.ended) == 1
    await bench.services.admission._claims.close()
