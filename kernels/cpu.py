"""The CPU kernels behind torch tensors. Each function takes contiguous float32 or bfloat16 tensors.

`cpu_attention.h` says how K lies inside a block; a pool written here is read here only.
"""

from __future__ import annotations

import ctypes
import functools
import logging

import torch
from torch import Tensor

from plait.kernels import build
from plait.kernels.batch import Batch

log = logging.getLogger(__name__)


class Iteration(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p) for name in ("pool", "query_start", "seq_lens", "block_tables", "slots")
    ] + [
        (name, ctypes.c_int64)
        for name in (
            *(
                "sequences",
                "max_blocks",
                "tokens",
                "layers",
                "q_heads",
                "kv_heads",
                "dim",
                "block_size",
                "is_bf16",
            ),
        )
    ]


class Packed(ctypes.Structure):
    """Weights in panels, and for int8 a scale of each output."""

    _fields_ = [("weights", ctypes.c_void_p), ("scales", ctypes.c_void_p)]


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, Packed) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("qkv_bias", "norm", "mlp_norm")),
        ("window", ctypes.c_int64),
    ]


class Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.c_void_p),
        ("seconds", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "inner", "threads")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "plait_attention": [_P, _P, _I, _I, _P, _I, _F, _I, _F, _P],
    "plait_write_kv": [_P, _P, _P, _I, _I, _I, _I, _I],
    "plait_forward": [_P, _P, _P, _P, _P],
    "plait_linear": [_P, _P, _P, _I, _I, _I, _I, _I],
    "plait_argmax": [_P, _I, _I, _I, _P],
    "plait_draw": [_P, _P, _I, _I, _I, _P, _P, _P, _P, _P, _I, _P],
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, said once in the log, where they cannot be compiled."""
    try:
        lib = build.load()
    except (RuntimeError, OSError) as error:
        log.warning("CPU kernels are not available, torch runs in their place, slower: %s", error)
        return None
    if lib is None:
        log.warning("no C++ compiler found: torch runs in place of the CPU kernels, slower (install g++)")
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, None
    return lib


def takes(pool: Tensor, q_heads: int) -> bool:
    """Whether the kernels know this pool's shape and dtype."""
    _, _, _, kv_heads, block_size, dim = pool.shape
    lib = library()
    return (
        lib is not None
        and pool.device.type == "cpu"
        and pool.dtype in (torch.float32, torch.bfloat16)
        and dim % 16 == 0
        and dim <= lib.plait_max_dim()
        and block_size % 16 == 0
        and q_heads % kv_heads == 0
        and q_heads // kv_heads <= lib.plait_max_group()
    )


def iteration(batch: Batch, q_heads: int) -> Iteration:
    """The part of a call that all layers of one iteration share. `batch` must outlive it."""
    pool = batch.pool
    _, layers, _, kv_heads, block_size, dim = pool.shape
    return Iteration(
        pool.data_ptr(),
        batch.query_start.data_ptr(),
        batch.seq_lens.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.slots.data_ptr(),
        batch.seq_lens.shape[0],
        batch.block_tables.stride(0),
        batch.slots.shape[0],
        layers,
        q_heads,
        kv_heads,
        dim,
        block_size,
        pool.dtype == torch.bfloat16,
    )


def write_kv(it: Iteration, layer: int, k: Tensor, v: Tensor) -> None:
    """k, v [T, Hkv, D], the last dimension contiguous, into the blocks that the batch's slots name."""
    library().plait_write_kv(  # type: ignore[union-attr]
        ctypes.byref(it), k.data_ptr(), v.data_ptr(), *k.stride()[:2], *v.stride()[:2], layer
    )


def attention(
    it: Iteration,
    layer: int,
    q: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D], the last dimension contiguous, against the cache; gives [T, Hq, D]. Sinks are float32 [Hq]."""
    out = torch.empty(q.shape, dtype=q.dtype)
    library().plait_attention(  # type: ignore[union-attr]
        ctypes.byref(it),
        q.data_ptr(),
        *q.stride()[:2],
        out.data_ptr(),
        layer,
        scale,
        window or 0,
        softcap or 0.0,
        None if sinks is None else sinks.data_ptr(),
    )
    return out


def forward(model: Decoder, it: Iteration, hidden: Tensor, cos: Tensor, sin: Tensor) -> None:
    """All decoder layers: hidden [1, T, H] float32 in place; cos, sin [1, T, D] float32."""
    library().plait_forward(  # type: ignore[union-attr]
        ctypes.byref(model), ctypes.byref(it), hidden.data_ptr(), cos.data_ptr(), sin.data_ptr()
    )


def linear(x: Tensor, packed: Packed, out: Tensor) -> None:
    """out [R, N] float32 = x [R, in] times weights packed by `decoder.pack`."""
    library().plait_linear(  # type: ignore[union-attr]
        x.data_ptr(),
        ctypes.byref(packed),
        out.data_ptr(),
        *x.shape,
        out.shape[1],
        torch.get_num_threads(),
        x.dtype == torch.bfloat16,
    )


def argmax(logits: Tensor) -> Tensor:
    """logits [R, V] float32, the last dimension contiguous: the first index of each row's largest, int64 [R]; -1 for
    a row that holds a NaN or whose largest is infinite."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    library().plait_argmax(  # type: ignore[union-attr]
        logits.data_ptr(), logits.shape[0], logits.stride(0), logits.shape[1], tokens.data_ptr()
    )
    return tokens


def draw(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    noise: Tensor,
) -> Tensor:
    """One token, int64 [N], for each of rows [N] int64 of logits [R, V] float32; -1 where a row is not finite.

    temperature (> 0), top_p and min_p are float32 [N], top_k int64 [N], noise float64 [N, lanes]; all contiguous.
    """
    tokens = torch.empty(rows.shape[0], dtype=torch.int64)
    library().plait_draw(  # type: ignore[union-attr]
        logits.data_ptr(),
        rows.data_ptr(),
        rows.shape[0],
        logits.stride(0),
        logits.shape[1],
        *(x.data_ptr() for x in (temperature, top_k, top_p, min_p, noise)),
        noise.shape[1],
        tokens.data_ptr(),
    )
    return tokens
