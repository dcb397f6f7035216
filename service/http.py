"""The admin endpoint: /livez, /readyz, /startupz and /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from plait.service.settings import HttpSettings

# None when all is well, else what is not.
Check = Callable[[], str | None]


class Admin:
    """Serves the checks and the metrics of one worker. `port` is the one that was bound."""

    def __init__(self, settings: HttpSettings, registry: CollectorRegistry, checks: dict[str, Check]) -> None:
        self._settings = settings
        self._registry = registry
        self._checks = checks
        self._runner: web.AppRunner | None = None
        self.port = settings.port

    async def start(self) -> None:
        """Raises OSError when the port is taken."""
        app = web.Application()
        for path, check in self._checks.items():
            app.router.add_get(path, _handler(check))
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._settings.host, self._settings.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


def _handler(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_: web.Request) -> web.Response:
        problem = check()
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    return handle
