"""A kernel is compiled anew, by way of Triton, for every kind of arguments that Triton tells apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.kernels import triton_launch
from plait.kernels.triton_launch import launch


class Kernel:
    """Notes who was called: the kernel itself, as at the first launch, or what it compiled."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, num_warps: int, num_stages: int) -> Any:
            self.calls.append(("kernel", grid, arguments, num_warps))
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel: Kernel):
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.calls.append(("compiled", grid, arguments))


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_compiled", {})


def test_the_second_launch_goes_to_what_was_compiled() -> None:
    kernel, x = Kernel(), torch.zeros(4)
    for tokens in (3, 5):
        launch(kernel, (tokens, 2), (x, None, 7, 0.5), (64, True), num_warps=2)
    assert kernel.calls == [
        ("kernel", (3, 2), (x, None, 7, 0.5, 64, True), 2),
        ("compiled", (5, 2, 1), (x, None, 7, 0.5, 64, True)),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": (torch.zeros(9)[1:], 7)},
        {"arguments": (torch.zeros(8).half(), 7)},
        {"arguments": (None, 7)},
        {"arguments": (torch.zeros(8), 1)},
        {"arguments": (torch.zeros(8), 32)},
        {"arguments": (torch.zeros(8), 1 << 31)},
        {"constants": (3,)},
        {"num_warps": 8},
        {"num_stages": 2},
    ],
    ids=["unaligned", "type", "none", "one", "sixteens", "long", "constant", "warps", "stages"],
)
def test_what_triton_tells_apart_is_compiled_anew(change: dict[str, Any]) -> None:
    kernel, plain = Kernel(), {"arguments": (torch.zeros(8), 7), "constants": (2,)}
    launch(kernel, (1,), **plain)
    launch(kernel, (1,), **plain | change)
    assert [call[0] for call in kernel.calls] == ["kernel", "kernel"]
