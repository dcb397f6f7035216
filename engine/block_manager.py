"""The KV pool's book-keeping: which block belongs to whom (PagedAttention, arXiv:2309.06180)."""

from __future__ import annotations


class BlockManager:
    """Blocks 0..num_blocks-1 of `block_size` tokens each, with reference counts.

    A block is in the free list exactly when its count is zero; `check` says whether that holds.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.counts = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))

    def needed(self, held: int, tokens: int) -> int:
        """How many blocks are missing for `tokens` tokens when `held` blocks are there."""
        return max(0, -(-tokens // self.block_size) - held)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self.free)

    def allocate(self, count: int) -> list[int]:
        if count > len(self.free):
            raise ValueError(f"{count} blocks asked for, {len(self.free)} free")
        taken = [self.free.pop() for _ in range(count)]
        for block in taken:
            self.counts[block] = 1
        return taken

    def share(self, blocks: list[int]) -> list[int]:
        """Another owner for blocks that have one: full blocks only, which nobody writes again."""
        for block in blocks:
            if self.counts[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            self.counts[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            if self.counts[block] == 0:
                raise ValueError(f"block {block} is released twice")
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.free.append(block)

    def check(self, tables: list[list[int]]) -> None:
        """Raise AssertionError unless these block tables account for every block that is not free."""
        held = [0] * self.num_blocks
        for table in tables:
            for block in table:
                held[block] += 1
        assert held == self.counts, "block tables and reference counts disagree"
        assert sorted(self.free) == [b for b in range(self.num_blocks) if held[b] == 0], (
            "the free list is wrong"
        )
