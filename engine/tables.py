"""Block tables by seat, on the host and on the device."""

from __future__ import annotations

import numpy as np
import torch

from plait.engine.sequence import Sequence
from plait.engine.staging import Staging


class BlockTables:
    """A row for each seat with the blocks of the sequence that sits there. Only what is new goes to the device."""

    def __init__(self, seats: int, width: int, device: torch.device):
        self.width = width
        self.host = np.zeros((seats, width), dtype=np.int32)
        self.rows = torch.zeros(seats, width, dtype=torch.int32, device=device)
        """On the device, as of the last `flush`."""
        self.owners: list[tuple[Sequence, int, int] | None] = [None] * seats
        self.filled = [0] * seats
        self.staging = Staging(device)
        self.new: list[np.ndarray] = []

    def seat(self, seq: Sequence) -> int:
        """The row of a sequence, brought up to date on the host; only new blocks are written, mostly."""
        seat, count = seq.seat, len(seq.blocks)
        owner = (seq, seq.preemptions, seq.replaced)
        if self.owners[seat] != owner:
            self.owners[seat], self.filled[seat] = owner, 0
        if (filled := self.filled[seat]) < count:
            self.host[seat, filled:count] = seq.blocks[filled:]
            self.new.append(np.arange(seat * self.width + filled, seat * self.width + count))
            self.filled[seat] = count
        return seat

    def flush(self) -> None:
        """Bring to the device what `seat` changed."""
        if self.new:
            at = np.concatenate(self.new)
            self.rows.view(-1).index_copy_(0, *self.staging.sent(at, self.host.reshape(-1)[at]))
            self.new.clear()
