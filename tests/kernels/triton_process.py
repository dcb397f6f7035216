"""Child processes for Triton: whether kernels are interpreted is settled when triton is first imported."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

SECONDS = 170


def interpreted(call: Callable, *args, **kwargs):
    """The result of the call in a process whose kernels run on CPU tensors, one program after another."""
    return _process(True).submit(call, *args, **kwargs).result(SECONDS)


def compiled(call: Callable, *args, **kwargs):
    """The result of the call in a process that can compile kernels, with an empty cache."""
    return _process(False).submit(call, *args, **kwargs).result(SECONDS)


@cache
def _process(interpret: bool) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_begin, initargs=(interpret,))


def _begin(interpret: bool) -> None:
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    os.environ["OMP_NUM_THREADS"] = "1"
    if interpret:
        repair_bfloat16()
    else:
        kept = tempfile.TemporaryDirectory(prefix="plait-triton-")
        _begin.kept = kept  # removed when the process ends
        os.environ["TRITON_CACHE_DIR"] = kept.name


def repair_bfloat16() -> None:
    """Make the interpreter convert bfloat16 before a dot; it multiplies the bit patterns (triton#11584)."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

    multiply = InterpreterBuilder.create_dot

    def widen(operand: TensorHandle) -> TensorHandle:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return TensorHandle(
            _convert_float(operand.data, tl.bfloat16, tl.float32, None).view("float32"), tl.float32
        )

    def create_dot(self, a, b, *rest):
        return multiply(self, widen(a), widen(b), *rest)

    InterpreterBuilder.create_dot = create_dot
