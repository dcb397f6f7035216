"""vLLM's CPU build, over the job on stdin. vLLM starts this module again in its own processes."""

from __future__ import annotations

import asyncio

from benchmarks.peer_job import Answers, Request, measure, read_job

KV_BYTES = 1 << 30


def main() -> None:
    import vllm
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    job = read_job()
    number = 0

    async def start() -> AsyncLLM:
        arguments = vllm.AsyncEngineArgs(
            model=job.model,
            dtype="bfloat16",
            max_num_seqs=job.seats,
            max_model_len=job.longest,
            kv_cache_memory_bytes=KV_BYTES,
            skip_tokenizer_init=True,
            enable_log_requests=False,
            disable_log_stats=True,
        )
        return AsyncLLM.from_engine_args(arguments)

    async def one(engine: AsyncLLM, r: Request, answers: Answers) -> None:
        nonlocal number
        number += 1
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=r.output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in engine.generate({"prompt_token_ids": r.prompt}, sampling, str(number)):
            answers.add(r.id, list(output.outputs[0].token_ids))

    async def answer(engine: AsyncLLM, requests: list[Request], answers: Answers) -> None:
        await asyncio.gather(*(one(engine, r, answers) for r in requests))

    with asyncio.Runner() as runner:
        engine = runner.run(start())
        try:
            measure(job, lambda r, a: runner.run(answer(engine, r, a)), vllm.__version__)
        finally:
            engine.shutdown()


if __name__ == "__main__":
    main()
