"""plait's engine alone, over the job on stdin."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from benchmarks.peer_job import Answers, Request, measure, read_job

from plait.engine.api import GenerationRequest, Output, SamplingParams
from plait.engine.config import EngineConfig
from plait.engine.process import EngineProcess


async def answer(engine: EngineProcess, requests: list[Request], answers: Answers) -> None:
    done, left = asyncio.Event(), len(requests)

    def on_output(output: Output) -> None:
        nonlocal left
        answers.add(output.request_id, output.token_ids)
        if output.finish:
            left -= 1
            if not left:
                done.set()

    for r in requests:
        sampling = SamplingParams(max_tokens=r.output_tokens, temperature=0, ignore_eos=True)
        engine.submit(GenerationRequest(r.id, r.prompt, sampling), on_output)
    await done.wait()


def main() -> None:
    job = read_job()
    engine = EngineProcess(EngineConfig(dtype="bfloat16", max_running=job.seats))

    def spent() -> dict[str, float] | None:
        return getattr(engine.stats, "time", None)

    with asyncio.Runner() as runner:
        runner.run(engine.start())
        measure(job, lambda r, a: runner.run(answer(engine, r, a)), version("plait"), spent)
        runner.run(engine.stop())


if __name__ == "__main__":
    main()
