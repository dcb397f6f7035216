"""`plait worker`: serves a requests topic until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.service.commands.signals import on_signals

if TYPE_CHECKING:
    from plait.service.settings import Settings


log = logging.getLogger(__name__)


def command(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", envvar="PLAIT_CONFIG", exists=True, dir_okay=False, help="A TOML file."
        ),
    ] = None,
    bootstrap_servers: Annotated[
        str | None, typer.Option("--bootstrap-servers", "-b", metavar="HOST:PORT[,...]")
    ] = None,
    group_id: Annotated[str | None, typer.Option("--group-id", help="The workers' consumer group.")] = None,
    requests_topic: Annotated[str | None, typer.Option("--requests-topic")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="smollm2, a path, or a hub id.")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="auto, bfloat16, float16, float32, int8.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = None,
    max_running: Annotated[
        int | None, typer.Option("--max-running", min=1, help="Seats in the batch.")
    ] = None,
    max_in_flight: Annotated[
        int | None, typer.Option("--max-in-flight", min=1, help="Requests read and not yet answered.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="default, fcfs, spt, priority, fair or slo.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=0, help="Of the CPU device; 0: all.")
    ] = None,
    http_host: Annotated[str | None, typer.Option("--http-host")] = None,
    http_port: Annotated[int | None, typer.Option("--http-port", min=0, max=65535)] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option("--otlp-endpoint", metavar="URL", help="Where traces go, by OTLP over HTTP.")
    ] = None,
    drain_seconds: Annotated[
        float | None, typer.Option("--drain-seconds", min=0, help="Time to finish what runs at shutdown.")
    ] = None,
) -> None:
    """Serve requests from Kafka. SIGTERM finishes what runs; a second signal stops at once.

    Flags win over PLAIT_* environment variables, and those over the file.
    """
    from plait.service.commands.connect import log_to_stderr
    from plait.service.settings import Settings

    flags: dict[str, dict[str, Any]] = {
        "kafka": {"bootstrap_servers": bootstrap_servers, "group_id": group_id},
        "topics": {"requests": requests_topic},
        "engine": {
            "model": model,
            "dtype": dtype,
            "device": device,
            "max_running": max_running,
            "policy": policy,
            "threads": threads,
        },
        "worker": {"max_in_flight": max_in_flight, "drain_seconds": drain_seconds},
        "http": {"host": http_host, "port": http_port},
        "telemetry": {"otlp_endpoint": otlp_endpoint},
    }
    given = {
        name: section
        for name, options in flags.items()
        if (section := {key: value for key, value in options.items() if value is not None})
    }
    settings = Settings.load(config, **given)
    log_to_stderr()
    asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    from plait.service.local import make_engine

    engine = make_engine(settings)
    await engine.launch()  # it imports for seconds, and this process does so meanwhile
    gc.disable()
    try:
        from plait.service.worker import Worker

        worker = Worker(settings, engine)
    except BaseException:
        await engine.stop()
        raise
    finally:
        # What was imported stays: no garbage collection need look at it again.
        gc.freeze()
        gc.enable()
    log.info("loading the model %s (the first time it is fetched and converted)", settings.engine.model)
    run = asyncio.ensure_future(worker.run())
    draining = cut_short = False

    def stop() -> None:
        nonlocal draining, cut_short
        if draining or worker.ready.is_set():
            draining = True
            worker.stop()
        elif not cut_short:
            # Still starting: there is nothing to finish.
            cut_short = True
            run.cancel()

    on_signals(stop)
    try:
        await run
    except asyncio.CancelledError:
        if not cut_short:
            raise
