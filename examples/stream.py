"""Send one request and print its tokens as they come."""

import asyncio
import sys

from plait.schemas import DoneEvent, TokensEvent
from plait.service.client import Client


async def main(bootstrap_servers: str) -> None:
    async with Client(bootstrap_servers) as client:
        request_id = await client.submit(
            messages=[{"role": "user", "content": "Why is the sky blue?"}],
            priority=7,
            max_tokens=60,
            temperature=0.3,
        )
        async for event in client.stream(request_id):
            if isinstance(event, TokensEvent):
                print(event.text, end="", flush=True)
            elif isinstance(event, DoneEvent):
                print(f"\n{event.usage.completion_tokens} tokens, {event.finish_reason}")


asyncio.run(main(sys.argv[1]))
