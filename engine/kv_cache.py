"""What sequences hold of the KV pool: the scheduler asks for whole sequences here, and never for blocks."""

from __future__ import annotations

from collections.abc import Iterable

from plait.engine.block_manager import BlockManager
from plait.engine.sequence import Chunk, Sequence


class KvCache:
    """Gives sequences blocks for all their tokens, and takes them back.

    A sequence outside the pool has no blocks; how many of its tokens count as computed is decided here alone,
    when it comes in (`admit`), goes on (`written`) and is put out (`evict`).
    """

    def __init__(self, blocks: BlockManager):
        self.blocks = blocks

    def admit(self, seq: Sequence, reserve: int) -> bool:
        """Blocks for all tokens of a sequence that has none, if `reserve` blocks stay free beside them."""
        needed = self.blocks.needed(0, len(seq.tokens))
        if not self.blocks.can_allocate(needed + reserve):
            return False
        seq.blocks = self.blocks.allocate(needed)
        return True

    def grow(self, seq: Sequence) -> bool:
        """Blocks for the tokens that a sequence got since; False, and nothing, when there are too few."""
        missing = self.blocks.needed(len(seq.blocks), len(seq.tokens))
        if not self.blocks.can_allocate(missing):
            return False
        seq.blocks += self.blocks.allocate(missing)
        return True

    def written(self, chunks: Iterable[Chunk]) -> None:
        """The chunks were computed: their KV is in the pool."""
        for chunk in chunks:
            chunk.seq.computed += chunk.count

    def evict(self, seq: Sequence) -> None:
        """Put a sequence out that will come back; what it computed is computed again from its tokens."""
        self.release(seq)
        seq.computed = 0

    def release(self, seq: Sequence) -> None:
        self.blocks.release(seq.blocks)
        seq.blocks = []

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError when the book-keeping is off; cheap enough to run whenever idle."""
        self.blocks.check([seq.blocks for seq in running])
