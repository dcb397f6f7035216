"""The connection by configuration: plait.toml or PLAIT_KAFKA_* say how, for the worker and for this client alike."""

import asyncio
import os
import sys

from plait.service.client import Client
from plait.service.kafka import connection
from plait.service.settings import Settings


async def main(bootstrap_servers: str) -> None:
    settings = Settings.load(os.environ.get("PLAIT_CONFIG"), kafka={"bootstrap_servers": bootstrap_servers})
    async with Client(bootstrap_servers, kafka=connection(settings.kafka, "example")) as client:
        result = await client.generate("The sea is", max_tokens=10)
        print(result.text)


asyncio.run(main(sys.argv[1]))
