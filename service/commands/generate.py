"""`plait generate`: one request, its text on the terminal as it comes."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

import typer

from plait.service.commands.options import BootstrapServers, RequestsTopic, Timeout


def command(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    bootstrap_servers: BootstrapServers = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            envvar="PLAIT_ENGINE_MODEL",
            show_default="smollm2, or what the brokers' workers serve",
            help="smollm2 (the bundled one), a model's directory, a GGUF file, or a hub id.",
        ),
    ] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", "-p", min=0, max=9, help="9 is the most urgent.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1)] = 256,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0, help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option("--top-p", min=0, max=1)] = 0.95,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; repeatable.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end.")] = False,
    requests_topic: RequestsTopic = "plait.requests",
    timeout: Timeout = 300.0,
) -> None:
    """Generate text; tokens are shown as they come."""
    if raw and system is not None:
        raise typer.BadParameter("a raw prompt has no system message", param_hint="--system")
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise typer.BadParameter("is empty", param_hint="PROMPT")
    request: dict[str, Any] = {
        "priority": priority,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "stop": stop or [],
    }
    if model is not None and bootstrap_servers is not None:
        request["model"] = model
    if seed is not None:
        request["seed"] = seed
    if raw:
        request["prompt"] = text
    else:
        request["messages"] = [{"role": "system", "content": system}] if system is not None else []
        request["messages"].append({"role": "user", "content": text})
    asyncio.run(_generate(bootstrap_servers, model or "smollm2", requests_topic, timeout, request, as_json))


async def _generate(
    bootstrap_servers: str | None,
    model: str,
    requests_topic: str,
    timeout_s: float,
    request: dict[str, Any],
    as_json: bool,
) -> None:
    from plait.schemas import DoneEvent, TokensEvent
    from plait.service.client import Client, StreamBroken
    from plait.service.commands.connect import kafka_options
    from plait.service.local import brokers_or_local

    sections = {"engine": {"model": model}, "topics": {"requests": requests_topic}}
    async with (
        brokers_or_local(bootstrap_servers, sections, _say) as stack,
        Client(
            stack.bootstrap_servers,
            requests_topic=requests_topic,
            timeout_s=timeout_s,
            kafka=kafka_options(stack.bootstrap_servers),
        ) as client,
    ):
        request_id = await client.submit(**request)
        pieces: list[str] = []
        done: DoneEvent | None = None
        try:
            async with stack.watching():
                async for event in client.stream(request_id):
                    if isinstance(event, TokensEvent):
                        pieces.append(event.text)
                        if not as_json:
                            print(event.text, end="", flush=True)
                    elif isinstance(event, DoneEvent):
                        done = event
        except (asyncio.CancelledError, TimeoutError, StreamBroken):
            await client.cancel(request_id)
            raise
        finally:
            if pieces and not as_json:
                print()
        assert done is not None
        if as_json:
            print(json.dumps(_summary(done, "".join(pieces)), ensure_ascii=False))
        elif not pieces:
            print()


def _say(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def _summary(done: Any, text: str) -> dict[str, Any]:
    return {
        "request_id": done.request_id,
        "text": text,
        "finish_reason": str(done.finish_reason),
        "usage": done.usage.model_dump(),
        "timing": done.timing.model_dump(),
    }
