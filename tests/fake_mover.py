"""A mover that keeps what every slot of both pools holds, and makes its copies as late as it may."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from plait.engine.sequence import Sequence

Slots = list[list[int | None]]


@dataclass
class FakeTransfer:
    source: Slots
    target: Slots
    pairs: list[tuple[int, int]]
    on_device: set[int]
    made: bool = False

    def done(self) -> bool:
        return self.made


@dataclass
class FakeMover:
    """With `late` a copy is made when an iteration needs its blocks, or `catch_up` is called."""

    num_blocks: int
    host_blocks: int
    block_size: int
    late: bool = False
    ahead: int = 0
    queue: deque[FakeTransfer] = field(default_factory=deque)
    moved: int = 0

    def __post_init__(self) -> None:
        self.device: Slots = [[None] * self.block_size for _ in range(self.num_blocks)]
        self.host: Slots = [[None] * self.block_size for _ in range(self.host_blocks)]

    def out(self, pairs: list[tuple[int, int]]) -> None:
        self._begin(FakeTransfer(self.device, self.host, list(pairs), {block for block, _ in pairs}))

    def into(self, pairs: list[tuple[int, int]]) -> FakeTransfer | None:
        transfer = FakeTransfer(self.host, self.device, list(pairs), {block for _, block in pairs})
        self._begin(transfer)
        return transfer if self.late else None

    def _begin(self, transfer: FakeTransfer) -> None:
        assert transfer.pairs
        self.moved += len(transfer.pairs)
        self.queue.append(transfer)
        if not self.late:
            self.catch_up(1)

    def catch_up(self, count: int) -> None:
        """Make so many of the copies, in their order."""
        for _ in range(min(count, len(self.queue))):
            transfer = self.queue.popleft()
            for source, target in transfer.pairs:
                transfer.target[target] = list(transfer.source[source])
            transfer.made = True

    def settle(self, blocks: list[int]) -> None:
        """What an iteration does before it reads or writes these blocks."""
        concerned = [i for i, t in enumerate(self.queue) if t.on_device & set(blocks)]
        self.catch_up(concerned[-1] + 1 if concerned else 0)

    def compute(self, seq: Sequence, count: int) -> None:
        """Read all that the sequence computed, write `count` tokens more: what a model's attention does."""
        for position in range(seq.computed + count):
            block, slot = seq.blocks[position // self.block_size], position % self.block_size
            content = hash((seq.tenant, *seq.tokens[: position + 1]))
            if position < seq.computed:
                assert self.device[block][slot] == content, f"{seq.id} reads something else at {position}"
            else:
                self.device[block][slot] = content
