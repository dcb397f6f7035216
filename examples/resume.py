"""A reader that goes away and comes back: another process could go on with the token, and nothing is read twice."""

import asyncio
import sys

from plait.schemas import TokensEvent
from plait.service.client import Client


async def main(bootstrap_servers: str) -> None:
    # A topic per request is there for whoever knows the id; a client's own topic goes with the client.
    async with Client(bootstrap_servers, per_request_topics=True) as client:
        request_id = await client.submit("The three primary colours are", max_tokens=20, temperature=0)
        text = ""
        async for event in client.stream(request_id):
            if isinstance(event, TokensEvent):
                text += event.text
                token = client.position(request_id)
                print("first reader:", event.text)
                break

    async with Client(bootstrap_servers, per_request_topics=True) as client:
        async for event in client.stream(request_id, resume=token):
            if isinstance(event, TokensEvent):
                text += event.text
        print("both together:", text)


asyncio.run(main(sys.argv[1]))
