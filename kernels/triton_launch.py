"""Launches of Triton kernels at a fraction of the host time that Triton's own look at their arguments takes."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

# By everything that Triton compiles a kernel anew for.
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: triton.JITFunction,
    grid: tuple[int, ...],
    arguments: tuple[Tensor | int | float | None, ...],
    constants: tuple[Any, ...],
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    """`kernel[grid]` with all arguments by position, the compile-time ones last.

    The first call with arguments of some kind goes through Triton, which compiles; later ones go straight to what it
    compiled. In Triton's interpreter nothing is compiled, and all calls are first ones.
    """
    key = (kernel, constants, num_warps, num_stages, *map(_kind, arguments))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, *constants, num_warps=num_warps, num_stages=num_stages)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)


def _kind(x: Tensor | int | float | None) -> object:
    """What Triton may specialize on: type and alignment of a pointer; one and multiples of 16 among integers."""
    if x is None:
        return None
    if type(x) is int:
        return (x == 1, x % 16 == 0, x.bit_length() > 31)
    if type(x) is float:
        return float
    return (x.dtype, x.get_device(), x.data_ptr() % 16 == 0)
