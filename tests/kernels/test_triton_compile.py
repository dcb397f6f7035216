"""The kernels compiled ahead of time, without a device, for Ampere, Ada and Hopper."""

import re
import subprocess
from dataclasses import dataclass

import pytest
import torch
from triton_process import compiled

SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64"}


@dataclass(frozen=True)
class Built:
    ptx: str
    cubin: int
    shared: int
    stack: int
    local: int
    registers: int


def build(
    kernel, pointers: dict[str, str], scalars: dict[str, str], constants: dict, target: int, **options
) -> Built:
    """Compiles as a launch would: pointers and strides are multiples of 16, what is not named is None."""
    from pathlib import Path
    from tempfile import TemporaryDirectory

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {name: f"*{kind}" for name, kind in pointers.items()} | scalars
    signature = {name: types.get(name, "constexpr") for name in names}
    fixed = {name: constants.get(name) for name in names if name not in types}
    aligned = [name for name in names if name in pointers or (name.endswith("stride") and name in scalars)]
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name in aligned if name != "table_stride"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(made.asm["cubin"])
        text = subprocess.check_output([dump, "--dump-resource-usage", file], text=True)
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return Built(
        ptx=made.asm["ptx"],
        cubin=len(made.asm["cubin"]),
        shared=max(used["SHARED"], made.metadata.shared),
        stack=used["STACK"],
        local=used["LOCAL"],
        registers=used["REG"],
    )


@dataclass(frozen=True)
class Shape:
    group: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


SHAPES = {
    "smollm2": Shape(3, 3, 64),
    "smollm2-fp32": Shape(3, 3, 64, torch.float32),
    "llama-3-8b": Shape(4, 8, 128),
    "gemma-2-9b": Shape(2, 8, 256, window=4096, softcap=50.0),
    "gpt-oss": Shape(8, 8, 64, window=128, sinks=True),
    "phi-2": Shape(1, 32, 80),
}


def attention(shape: Shape, target: int, decode: bool) -> Built:
    from plait.kernels.triton_attention import attention_kernel
    from plait.kernels.triton_config import Device, launch_for

    launch = launch_for(
        Device(divmod(target, 10), 100), shape.dtype, shape.head_dim, shape.group, decode=decode
    )
    kind = SHORT[shape.dtype]
    pointers = dict.fromkeys(("out", "q", "pool"), kind)
    pointers |= dict.fromkeys(("query_start", "seq_lens", "block_tables"), "i32")
    pointers |= dict.fromkeys(("partial", "stats") if decode else (), "fp32")
    pointers |= dict.fromkeys(("items", "firsts", "share") if decode else (), "i32")
    pointers |= dict.fromkeys(("sinks",) if shape.sinks else (), kind)
    integers = ("layer", "first_seq", "num_seqs", "table_stride", "q_token_stride", "q_head_stride")
    pool = torch.empty(1, 32, 2, shape.kv_heads, 16, shape.head_dim, device="meta")
    values = launch.constants(pool, shape.group * shape.kv_heads, shape.window, shape.softcap)
    constants = dict(zip(attention_kernel.arg_names[-len(values) :], values, strict=True))
    return build(
        attention_kernel,
        pointers,
        {"scale": "fp32"} | dict.fromkeys(integers, "i32"),
        constants,
        target,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def check(built: Built, target: int) -> None:
    assert f".target sm_{target}" in built.ptx
    assert built.cubin > 0
    assert built.shared <= SHARED_LIMIT[target]
    assert (built.stack, built.local) == (0, 0), f"spills with {built.registers} registers"


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", SHAPES)
def test_attention(name, decode, target):
    built = compiled(attention, SHAPES[name], target, decode)
    check(built, target)
    if SHAPES[name].dtype != torch.float32:
        # Keys and values come by asynchronous copies, and the products run on the tensor cores.
        assert "cp.async" in built.ptx
        assert "mma" in built.ptx


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
def test_the_largest_heads_fit_the_smallest_device(decode):
    check(compiled(attention, SHAPES["gemma-2-9b"], 89, decode), 89)


def layer_parts(target: int) -> dict[str, Built]:
    from plait.kernels.triton_layer import norm_kernel, rotary_kernel, silu_kernel

    rows = dict.fromkeys(("out", "stream", "added", "weight"), "bf16")
    heads = dict.fromkeys(("qkv", "pool", "cos", "sin", "q_norm", "k_norm"), "bf16") | {"slots": "i64"}
    shape = {"NUM_LAYERS": 36, "KV_HEADS": 8, "GROUP": 4, "GROUP_PAD": 8, "BLOCK_SIZE": 16}
    return {
        "norm": build(norm_kernel, rows, {"eps": "fp32"}, {"WIDTH": 4096, "PAD": 4096}, target, num_warps=8),
        "silu": build(
            silu_kernel, {"out": "bf16", "gate_up": "bf16"}, {}, {"WIDTH": 14336, "TILE": 1024}, target
        ),
        "rotary": build(
            rotary_kernel,
            heads,
            {"eps": "fp32", "layer": "i32"},
            shape | {"HALF": 64, "HALF_PAD": 64},
            target,
            num_warps=2,
        ),
    }


@pytest.mark.parametrize("target", [80, 90])
def test_parts_of_a_layer(target):
    built = compiled(layer_parts, target)
    for kernel in built.values():
        check(kernel, target)
    assert "st.global.v4" in built["norm"].ptx and "st.global.v4" in built["silu"].ptx


def others(target: int) -> dict[str, Built]:
    from plait.kernels.triton_attention import combine_kernel, plan_kernel
    from plait.kernels.triton_cache import copy_kernel, write_kernel

    strides = ("layer", "k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride")
    return {
        "combine": build(
            combine_kernel,
            {"out": "bf16", "partial": "fp32", "stats": "fp32", "firsts": "i32"},
            {},
            {"HEADS": 32, "HEAD_DIM": 128, "HEAD_PAD": 128, "LANES": 16},
            target,
            num_warps=2,
        ),
        "plan": build(
            plan_kernel,
            dict.fromkeys(("items", "firsts", "share", "seq_lens"), "i32"),
            dict.fromkeys(("num_seqs", "wanted", "least"), "i32"),
            {"WINDOW": 128, "TILE_N": 64, "LANES": 256},
            target,
        ),
        "write": build(
            write_kernel,
            {"pool": "bf16", "k": "bf16", "v": "bf16", "slots": "i64"},
            dict.fromkeys(strides, "i32"),
            {"NUM_LAYERS": 32, "KV_HEADS": 8, "BLOCK_SIZE": 16, "HEAD_DIM": 128, "TILE": 1024},
            target,
        ),
        "copy": build(
            copy_kernel,
            {"src": "i64", "dst": "i64", "pairs": "i32"},
            {},
            {"WORDS": 262144, "TILE": 4096},
            target,
            num_warps=8,
        ),
    }


@pytest.mark.parametrize("target", [80, 90])
def test_cache_kernels(target):
    built = compiled(others, target)
    for kernel in built.values():
        check(kernel, target)
    # 16 bytes at a time
    assert "st.global.v4" in built["write"].ptx
    assert "st.global.v2.b64" in built["copy"].ptx or "st.global.v4" in built["copy"].ptx
