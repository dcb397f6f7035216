"""OpenVINO GenAI's continuous batching, over the job on stdin."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai as genai
from benchmarks.peer_job import Answers, Request, measure, read_job


def pipeline(model: str, seats: int) -> genai.ContinuousBatchingPipeline:
    scheduling = genai.SchedulerConfig()
    scheduling.max_num_seqs = seats
    scheduling.cache_size = 1  # GB
    return genai.ContinuousBatchingPipeline(model, scheduling, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})


def main() -> None:
    job = read_job()
    pipe = pipeline(job.model, job.seats)
    number = 0

    def answer(requests: list[Request], answers: Answers) -> None:
        nonlocal number
        handles = []
        for r in requests:
            config = genai.GenerationConfig(max_new_tokens=r.output_tokens, ignore_eos=True, do_sample=False)
            number += 1
            tensor = ov.Tensor(np.array([r.prompt], dtype=np.int64))
            handles.append((r.id, pipe.add_request(number, tensor, config)))
        while pipe.has_non_finished_requests():
            pipe.step()
            for name, handle in handles:
                while handle.can_read():
                    for output in handle.read().values():
                        answers.add(name, output.generated_ids)

    measure(job, answer, genai.get_version())


if __name__ == "__main__":
    main()
