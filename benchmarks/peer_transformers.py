"""transformers, over the job on stdin: `static` batches with generate, or its continuous batching (`cb`)."""

from __future__ import annotations

import argparse

import torch
import transformers
from benchmarks.peer_job import Answers, Job, Request, measure, read_job
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

BATCH = 16
PAGE = 256
# Its own default of 8,192 makes an attention mask of hundreds of MB on a CPU.
STEP_TOKENS = 512


def static(model: PreTrainedModel, job: Job) -> None:
    """Left-padded batches, in order: a batch lasts as long as its longest request, and ends for all at once."""

    def answer(requests: list[Request], answers: Answers) -> None:
        for at in range(0, len(requests), BATCH):
            batch = requests[at : at + BATCH]
            width = max(len(r.prompt) for r in batch)
            ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in batch])
            mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(r.output_tokens for r in batch),
                do_sample=False,
                pad_token_id=0,
            )
            # Only what was asked for counts, not what a request generates while it waits for its batch.
            for r, row in zip(batch, out.tolist(), strict=True):
                answers.add(r.id, row[width : width + r.output_tokens])

    model.generation_config.eos_token_id = None
    measure(job, answer, transformers.__version__)


def continuous(model: PreTrainedModel, job: Job) -> None:
    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=job.longest, pad_token_id=0)
    # Without a number of blocks it takes nearly all memory of the machine.
    blocks = sum(-(-(len(r.prompt) + r.output_tokens) // PAGE) + 1 for r in job.requests[: job.seats]) + 8
    batching = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=blocks,
        max_batch_tokens=STEP_TOKENS,
        max_requests_per_batch=job.seats,
        allow_block_sharing=False,
    )
    manager = model.init_continuous_batching(config, batching)
    manager.start()

    def answer(requests: list[Request], answers: Answers) -> None:
        for r in requests:
            manager.add_request(
                r.prompt, request_id=r.id, max_new_tokens=r.output_tokens, record_timestamps=True
            )
        left = len(requests)
        while left:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the generation thread has ended")
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            if result.is_finished():
                for token, at in zip(result.generated_tokens, result.timestamps, strict=True):
                    answers.add(result.request_id, [token], at)
                left -= 1

    measure(job, answer, transformers.__version__)
    manager.stop(block=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=["static", "cb"])
    how = parser.parse_args().how
    job = read_job()
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16)
    (static if how == "static" else continuous)(model, job)


if __name__ == "__main__":
    main()
