"""A span of the caller's: the worker's spans, down to the last token, become part of its trace."""

import asyncio
import sys

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from plait.service.client import Client

# With an OTLP exporter on this provider, and `plait worker --otlp-endpoint URL`, both ends meet in one trace.
trace.set_tracer_provider(TracerProvider())
tracer = trace.get_tracer("shop")


async def main(bootstrap_servers: str) -> None:
    async with Client(bootstrap_servers) as client:
        with tracer.start_as_current_span("describe product") as span:
            result = await client.generate("A blue ceramic mug is", max_tokens=20)
            print(trace.format_trace_id(span.get_span_context().trace_id), result.text)


asyncio.run(main(sys.argv[1]))
