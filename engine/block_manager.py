"""A pool's book-keeping: which block belongs to whom (PagedAttention, arXiv:2309.06180)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container


class BlockManager:
    """Blocks 0..num_blocks-1 of `block_size` tokens each, with reference counts.

    A block whose count is zero is free, or kept: nobody has it, its content may yet be of use, and it goes when
    there is too little else, the one released first before all others. `check` says whether that holds.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.counts = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.kept: OrderedDict[int, None] = OrderedDict()

    def needed(self, held: int, tokens: int) -> int:
        """How many blocks are missing for `tokens` tokens when `held` blocks are there."""
        return max(0, -(-tokens // self.block_size) - held)

    @property
    def available(self) -> int:
        """Blocks that nobody has; the kept ones among them must be forgotten before they can be allocated."""
        return len(self.free) + len(self.kept)

    def allocate(self, count: int) -> list[int]:
        if count > len(self.free):
            raise ValueError(f"{count} blocks asked for, {len(self.free)} free")
        taken = [self.free.pop() for _ in range(count)]
        for block in taken:
            self.counts[block] = 1
        return taken

    def share(self, blocks: list[int]) -> list[int]:
        """Another owner for blocks that have one or are kept: full blocks only, which nobody writes again."""
        for block in blocks:
            if self.counts[block] == 0:
                if block not in self.kept:
                    raise ValueError(f"block {block} is free and cannot be shared")
                del self.kept[block]
            self.counts[block] += 1
        return list(blocks)

    def release(self, blocks: list[int], keep: Container[int] = ()) -> None:
        """One owner less; those that had one only are kept if in `keep`, the last of a list as the first to go."""
        for block in reversed(blocks):
            if self.counts[block] == 0:
                raise ValueError(f"block {block} is released twice")
            self.counts[block] -= 1
            if self.counts[block] == 0:
                if block in keep:
                    self.kept[block] = None
                else:
                    self.free.append(block)

    def forget(self, block: int) -> None:
        """A kept block becomes free."""
        del self.kept[block]
        self.free.append(block)

    def check(self, tables: list[list[int]]) -> None:
        """Raise AssertionError unless these block tables account for every block that is neither free nor kept."""
        held = [0] * self.num_blocks
        for table in tables:
            for block in table:
                held[block] += 1
        assert held == self.counts, "block tables and reference counts disagree"
        assert sorted([*self.free, *self.kept]) == [b for b in range(self.num_blocks) if held[b] == 0], (
            "the free list is wrong"
        )

    def check_whole(self) -> None:
        """Raise AssertionError unless nobody has a block; cheap enough to run whenever idle."""
        assert not any(self.counts), "a block has an owner"
        assert self.available == self.num_blocks, "a block is lost"
