"""Many requests at once over one connection; those that are refused for load are sent again later."""

import asyncio
import sys

from plait.service.client import Client, RequestFailed


async def ask(client: Client, word: str) -> str:
    while True:
        try:
            result = await client.generate(
                messages=[{"role": "user", "content": f"Explain the word {word} in one sentence."}],
                priority=2,
                slo={"deadline_ms": 600_000},
                max_tokens=40,
                temperature=0.3,
                seed=1,
            )
            return result.text.strip()
        except RequestFailed as failure:
            if not failure.retryable:
                raise
            await asyncio.sleep((failure.retry_after_ms or 1000) / 1000)


async def main(bootstrap_servers: str) -> None:
    words = ["plait", "braid", "weave", "knot", "thread", "loom"]
    async with Client(bootstrap_servers) as client:
        answers = await asyncio.gather(*(ask(client, word) for word in words))
    for word, answer in zip(words, answers, strict=True):
        print(f"{word}: {answer}")


asyncio.run(main(sys.argv[1]))
