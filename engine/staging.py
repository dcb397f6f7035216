"""Small arrays of one iteration, brought to the device in one copy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Kernels are compiled for pointers that are multiples of 16 bytes, and again for others.
ALIGN = 64


class Staging:
    """Packs arrays into one piece of pinned memory, and their copies on the device into one tensor.

    What was sent is overwritten by the next call, in the order of the stream; nothing waits but for the copy before.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.copied = torch.cuda.Event() if device.type == "cuda" else None
        self._make(1 << 14)

    def _make(self, size: int) -> None:
        self.packed = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.pinned = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self.bytes = self.pinned.numpy()

    def send(self, *arrays: np.ndarray) -> None:
        """Arrays of the same sizes come to lie at the same places, unless some call in between sent more."""
        *_, size = offsets = places(arrays)
        if self.copied is not None:
            self.copied.synchronize()
        if size > len(self.bytes):
            self._make(2 * size)
        for array, at in zip(arrays, offsets, strict=False):
            self.bytes[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        self.packed[:size].copy_(self.pinned[:size], non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def views(self, *arrays: np.ndarray) -> list[Tensor]:
        """What was sent last, as tensors on the device; of the arrays only dtype and shape are looked at."""
        return [
            self.packed[at : at + a.nbytes].view(torch.from_numpy(a).dtype).view(a.shape)
            for a, at in zip(arrays, places(arrays), strict=False)
        ]

    def sent(self, *arrays: np.ndarray) -> list[Tensor]:
        self.send(*arrays)
        return self.views(*arrays)


def places(arrays: tuple[np.ndarray, ...]) -> list[int]:
    """Where each array begins, in bytes, and where all end."""
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + -(-array.nbytes // ALIGN) * ALIGN)
    return offsets
