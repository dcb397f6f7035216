"""Stop a request after its first words."""

import asyncio
import sys

from plait.schemas import DoneEvent, TokensEvent
from plait.service.client import Client


async def main(bootstrap_servers: str) -> None:
    async with Client(bootstrap_servers) as client:
        request_id = await client.submit("Once upon a time", max_tokens=1000, ignore_eos=True)
        words = 0
        async for event in client.stream(request_id):
            if isinstance(event, TokensEvent):
                words += 1
                if words == 5:
                    await client.cancel(request_id)
            elif isinstance(event, DoneEvent):
                print(event.finish_reason, "after", event.usage.completion_tokens, "tokens")


asyncio.run(main(sys.argv[1]))
