"""What sequences hold of the KV pool: the scheduler asks for whole sequences here, and never for blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from plait.engine.block_manager import BlockManager
from plait.engine.page_store import PageStore
from plait.engine.prefix_cache import Page, PrefixCache
from plait.engine.sequence import Chunk, Sequence
from plait.engine.swap_cost import SwapCosts
from plait.engine.transfer import Mover

Preemption = Literal["auto", "swap", "recompute"]


class KvCache:
    """Gives sequences blocks for all their tokens, and takes them back.

    A sequence outside the pool has no blocks; how many of its tokens count as computed is decided here alone,
    when it comes in (`admit`), goes on (`written`) and is put out (`evict`). One that was swapped out keeps a place
    on the host for all that it computed, and none on the device.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        host_blocks: int = 0,
        mover: Mover | None = None,
        costs: SwapCosts | None = None,
        preemption: Preemption = "auto",
        prefix_cache: bool = False,
    ):
        """Nothing is swapped without a `mover` and `host_blocks`. Without `costs`, `auto` means swap."""
        self.blocks = blocks
        self.preemption, self.costs = preemption, costs
        self.prefix = PrefixCache(blocks.block_size) if prefix_cache else None
        host = BlockManager(host_blocks if mover else 0, blocks.block_size)
        self.store = PageStore(blocks, host, mover, costs, self.prefix)
        self.swapped: set[Sequence] = set()
        self.swaps = 0
        self.queried_tokens = self.hit_tokens = 0

    def admit(self, seq: Sequence, reserve: int) -> bool:
        """Blocks for all tokens of a sequence that has none, if `reserve` blocks stay available beside them."""
        if self.shortage(seq, reserve) > 0:
            return False
        store, blocks = self.store, self.blocks
        back = seq in self.swapped
        pages = seq.pages if back else self._found(seq)
        here = [p.block for p in pages if p.block >= 0]
        missing = blocks.needed(len(here), len(seq.tokens))
        # Held before anything is allocated, or room would be made of them.
        blocks.share(here)
        away = [p for p in pages if p.block < 0]
        if not back:
            store.host.share([p.host for p in away])
        seq.arriving = store.fetch(away)
        seq.blocks = [p.block for p in pages] + store.allocate(missing - len(away))
        store.unpin(pages if back else away)
        if back:
            self.swapped.remove(seq)
            for page in pages:
                if not page.in_tree:
                    store.discard(page)
        else:
            self._count(seq, len(pages) * blocks.block_size)
        seq.pages = [p for p in pages if p.in_tree]
        return True

    def shortage(self, seq: Sequence, reserve: int) -> int:
        """Blocks that have to become available before `admit` can succeed; none when that is zero or less."""
        pages = seq.pages if seq in self.swapped else self._found(seq)
        here = [p.block for p in pages if p.block >= 0]
        idle = sum(self.blocks.counts[block] == 0 for block in here)
        return self.blocks.needed(len(here), len(seq.tokens)) + reserve - (self.blocks.available - idle)

    def gain(self, victim: Sequence, seq: Sequence) -> int:
        """Blocks by which a waiting sequence's shortage gets smaller, at least, when a running one is put out."""
        shared = {page.block for page in seq.pages}
        return sum(self.blocks.counts[block] == 1 and block not in shared for block in victim.blocks)

    def _found(self, seq: Sequence) -> list[Page]:
        """Pages of a waiting sequence's tokens. At least the last token is left to be computed: it gives logits."""
        if self.prefix is None:
            return []
        limit = (len(seq.tokens) - 1) // self.blocks.block_size
        seq.pages = pages = self.prefix.match(seq.tenant, seq.tokens, seq.pages, limit)
        if self.costs is not None and not self.costs.fetching_pays():
            pages = pages[: next((i for i, p in enumerate(pages) if p.block < 0), None)]
        return pages

    def _count(self, seq: Sequence, hit: int) -> None:
        seq.computed = hit
        if self.prefix is not None:
            self.queried_tokens += len(seq.tokens)
            self.hit_tokens += hit
        if seq.preemptions == 0:
            seq.cached_tokens = min(hit, seq.prompt_len)

    def ready(self, seq: Sequence) -> bool:
        """Whether all that a running sequence computed has arrived; one that runs before that has to wait for it."""
        if seq.arriving is not None and seq.arriving.done():
            seq.arriving = None
        return seq.arriving is None

    def at_hand(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence that need not be computed when it comes in now."""
        return seq.computed if seq in self.swapped else len(self._found(seq)) * self.blocks.block_size

    def grow(self, seq: Sequence) -> bool:
        """Blocks for the tokens that a sequence got since; False, and nothing, when there are too few."""
        missing = self.blocks.needed(len(seq.blocks), len(seq.tokens))
        if not missing:
            return True
        if missing > self.blocks.available:
            return False
        seq.blocks += self.store.allocate(missing)
        return True

    def written(self, chunks: Iterable[Chunk]) -> None:
        """The chunks were computed: their KV is in the pool, and others may find the blocks that are full."""
        size, prefix = self.blocks.block_size, self.prefix
        for chunk in chunks:
            seq = chunk.seq
            seq.computed += chunk.count
            if prefix is not None and seq.computed >= (len(seq.pages) + 1) * size:
                self._publish(seq, prefix)

    def _publish(self, seq: Sequence, prefix: PrefixCache) -> None:
        size, child, keep = self.blocks.block_size, prefix.child, self.store.keep
        pages, blocks, tokens = seq.pages, seq.blocks, seq.tokens
        page = pages[-1] if pages else prefix.root(seq.tenant)
        for i in range(len(pages), seq.computed // size):
            page = child(page, tokens[i * size : (i + 1) * size])
            block = blocks[i]
            if page.block < 0:
                page.block = block
                keep(page)
            else:
                # Somebody else computed the same: one block serves both.
                blocks[i : i + 1] = self.blocks.share([page.block])
                self.blocks.release([block])
                seq.replaced += 1
            pages.append(page)

    def evict(self, seq: Sequence) -> bool:
        """Put a sequence out that will come back. True when it keeps what it computed; else that is computed again,
        but for what is found in the prefix cache when it comes back."""
        count = self.blocks.needed(0, seq.computed)
        own = seq.blocks[len(seq.pages) : count]
        pages = seq.pages + [Page(block=block) for block in own]
        keeps = count > 0 and self._swaps(seq, pages) and self.store.pin(pages)
        if keeps:
            for page in pages[len(seq.pages) :]:
                self.store.keep(page)
            self.swapped.add(seq)
            self.swaps += 1
            seq.pages = pages
        else:
            seq.computed = 0
        self.store.release(seq.blocks)
        seq.blocks, seq.arriving = [], None
        return keeps

    def _swaps(self, seq: Sequence, pages: list[Page]) -> bool:
        if self.preemption != "auto" or self.costs is None:
            return self.preemption != "recompute"
        alone = sum(not p.stored and self.blocks.counts[p.block] == 1 for p in pages)
        return self.costs.transfer(alone, len(pages)) <= self.costs.recompute(seq.computed)

    def release(self, seq: Sequence, *, sound: bool = True) -> None:
        """A sequence is over. What it computed may be found by others, if it is `sound`."""
        if seq in self.swapped:
            self.swapped.remove(seq)
            for page in seq.pages:
                if not page.in_tree:
                    self.store.discard(page)
            self.store.unpin(seq.pages)
        self.store.release(seq.blocks)
        if not sound:
            self.store.drop_idle(seq.pages)
        seq.blocks, seq.pages, seq.arriving = [], [], None

    def clear(self) -> None:
        """Forget what is found by prefix and held by nobody."""
        if self.prefix is not None:
            for root in list(self.prefix.roots.values()):
                for page in list((root.children or {}).values()):
                    self.store.drop_idle([page])

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError when the book-keeping is off."""
        running = list(running)
        self.blocks.check([seq.blocks for seq in running])
        for seq in running:
            assert [p.block for p in seq.pages] == seq.blocks[: len(seq.pages)], "a page is not in its block"
            assert all(p.in_tree for p in seq.pages), "a page in use was forgotten"
        self.store.check([seq.pages for seq in self.swapped])

    def check_idle(self) -> None:
        """Raise AssertionError when nobody should hold anything and somebody does; cheap enough for every pause."""
        assert not self.swapped, "a sequence is swapped out"
        self.blocks.check_whole()
        self.store.host.check_whole()
