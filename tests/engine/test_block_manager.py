"""The block manager against a plain model of who owns what."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from plait.engine.block_manager import BlockManager


class Owners(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 20), block_size=st.integers(1, 32))
    def begin(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 21))
    def allocate(self, count: int) -> None:
        free = len(self.blocks.free)
        assert self.blocks.available == free + len(self.blocks.kept)
        if count > free:
            with pytest.raises(ValueError, match=f"{count} blocks asked for, {free} free"):
                self.blocks.allocate(count)
            assert len(self.blocks.free) == free
            return
        taken = self.blocks.allocate(count)
        assert len(set(taken)) == count
        assert not set(taken) & {b for table in self.tables for b in table}
        self.tables.append(taken)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.tables:
            self.tables.append(self.blocks.share(data.draw(st.sampled_from(self.tables))))

    @rule(data=st.data(), keep=st.sets(st.integers(0, 19)))
    def release(self, data: st.DataObject, keep: set[int]) -> None:
        if self.tables:
            index = data.draw(st.integers(0, len(self.tables) - 1))
            kept = list(self.blocks.kept)
            table = self.tables.pop(index)
            self.blocks.release(table, keep)
            held = {b for table in self.tables for b in table}
            last_first = [b for b in reversed(table) if b in keep and b not in held]
            assert list(self.blocks.kept) == kept + last_first

    @rule()
    def forget(self) -> None:
        if self.blocks.kept:
            oldest = next(iter(self.blocks.kept))
            self.blocks.forget(oldest)
            assert oldest in self.blocks.free

    @rule()
    def share_kept(self) -> None:
        self.tables.append(self.blocks.share(list(self.blocks.kept)))

    @invariant()
    def accounted(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check(self.tables)
            held = Counter(b for table in self.tables for b in table)
            assert self.blocks.available == self.blocks.num_blocks - len(held)

    def teardown(self) -> None:
        if hasattr(self, "blocks"):
            while self.tables:
                self.blocks.release(self.tables.pop())
            self.blocks.check_whole()


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    "held,tokens,missing",
    [(0, 0, 0), (0, 1, 1), (0, 16, 1), (0, 17, 2), (1, 16, 0), (1, 17, 1), (3, 17, 0)],
)
def test_needed_rounds_up_to_whole_blocks(held: int, tokens: int, missing: int) -> None:
    assert BlockManager(8, 16).needed(held, tokens) == missing


def test_a_block_is_not_released_twice_nor_shared_when_free() -> None:
    blocks = BlockManager(2, 16)
    taken = blocks.allocate(1)
    blocks.release(taken)
    with pytest.raises(ValueError, match="released twice"):
        blocks.release(taken)
    with pytest.raises(ValueError, match="cannot be shared"):
        blocks.share(taken)


@pytest.mark.parametrize("spoil", ["leak", "two owners", "free and held"])
def test_check_finds_what_is_wrong(spoil: str) -> None:
    blocks = BlockManager(4, 16)
    table = blocks.allocate(2)
    tables = {"leak": [], "two owners": [table, table[:1]], "free and held": [table]}[spoil]
    if spoil == "free and held":
        blocks.free.append(table[0])
    with pytest.raises(AssertionError):
        blocks.check(tables)
