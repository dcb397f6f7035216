"""Where pages lie: in the device's blocks, in the host's, in both; and what makes room for what.

A page that nobody holds stays in its block of the device until that block is needed. Then it is demoted to the
host, if it is worth that, or if a sequence that was put out will come back for it: such pages have their host block set
aside at once, so they are never lost. The copy itself is made as late as it can be, and often never.
"""

from __future__ import annotations

from itertools import islice

from plait.engine.block_manager import BlockManager
from plait.engine.prefix_cache import Page, PrefixCache
from plait.engine.swap_cost import SwapCosts
from plait.engine.transfer import Mover, Pairs, Transfer


class PageStore:
    def __init__(
        self,
        blocks: BlockManager,
        host: BlockManager,
        mover: Mover | None,
        costs: SwapCosts | None,
        prefix: PrefixCache | None,
    ):
        """Without a mover `host` has no blocks; without `costs` every copy is worth it."""
        self.blocks, self.host = blocks, host
        self.mover, self.costs, self.prefix = mover, costs, prefix
        self.page_of: dict[int, Page] = {}
        """By device block: pages in the tree, and kept ones of sequences that are out."""
        self.page_at: dict[int, Page] = {}
        """By host block."""
        self.swapped_out = self.swapped_in = 0

    def allocate(self, count: int) -> list[int]:
        """Device blocks without content; kept ones are given up for them. ValueError when there are too few."""
        if count > len(self.blocks.free) and count <= self.blocks.available:
            self._reclaim(count)
        return self.blocks.allocate(count)

    def _reclaim(self, count: int) -> None:
        pairs: Pairs = []
        while len(self.blocks.free) < count:
            block = next(iter(self.blocks.kept))
            page = self.page_of[block]
            if not self._store(page, pairs):
                self._drop(page)
                continue
            del self.page_of[block]
            self.blocks.forget(block)
            page.block = -1
        self._copy_out(pairs)
        if pairs and self.mover is not None and self.mover.ahead:
            self._copy_out(self._ahead(self.mover.ahead))

    def _ahead(self, count: int) -> Pairs:
        """What goes next is copied before its block is needed, so that nothing has to wait for it then."""
        pairs: Pairs = []
        for block in list(islice(self.blocks.kept, count)):
            if block in self.blocks.kept:
                self._store(self.page_of[block], pairs)
        return pairs

    def _copy_out(self, pairs: Pairs) -> None:
        if pairs and self.mover is not None:
            self.mover.out(pairs)
            self.swapped_out += len(pairs)

    def _store(self, page: Page, pairs: Pairs) -> bool:
        """The host gets the page, by a pair if it has to be copied; False when it is not worth it."""
        if page.stored:
            return True
        if page.host < 0:
            if not page.in_tree or not self.host.available or not self._demotes():
                return False
            self._give_host(page)
            self.host.release([page.host], keep=self.page_at)
        pairs.append((page.block, page.host))
        page.stored = True
        return True

    def _demotes(self) -> bool:
        return self.costs is None or self.costs.demoting_pays()

    def _give_host(self, page: Page) -> None:
        """A host block of its own, held once; the page that was least recently of use there goes for it."""
        if not self.host.free:
            old = self.page_at[next(iter(self.host.kept))]
            if old.block < 0:
                self._drop(old)
            else:
                self._leave_host(old)
        (page.host,) = self.host.allocate(1)
        self.page_at[page.host] = page

    def _leave_host(self, page: Page) -> None:
        del self.page_at[page.host]
        self.host.forget(page.host)
        page.host, page.stored = -1, False

    def _drop(self, page: Page) -> None:
        """Forget a page that nobody holds, and those behind it."""
        assert self.prefix is not None
        for gone in self.prefix.remove(page):
            if gone.block >= 0:
                del self.page_of[gone.block]
                self.blocks.forget(gone.block)
                gone.block = -1
            if gone.host >= 0:
                self._leave_host(gone)

    def pin(self, pages: list[Page]) -> bool:
        """Set a host block aside for each of these pages that are held on the device; False, and nothing, when the
        host has too few."""
        there = [p for p in pages if p.host >= 0]
        fresh = [p for p in pages if p.host < 0]
        idle = sum(self.host.counts[p.host] == 0 for p in there)
        if len(fresh) > self.host.available - idle:
            return False
        self.host.share([p.host for p in there])
        for page in fresh:
            self._give_host(page)
        return True

    def unpin(self, pages: list[Page]) -> None:
        """One sequence less that will come back for these. Copies stay while they may be of use to others."""
        for page in reversed(pages):
            keep = page.in_tree and page.stored
            host = page.host
            self.host.release([host], keep=(host,) if keep else ())
            if self.host.counts[host] == 0 and not keep:
                del self.page_at[host]
                page.host, page.stored = -1, False

    def fetch(self, pages: list[Page]) -> Transfer | None:
        """Blocks for pages that are on the host alone, and held there, and their content into them."""
        if not pages or self.mover is None:
            return None
        blocks = self.allocate(len(pages))
        for page, block in zip(pages, blocks, strict=True):
            page.block = block
            if page.in_tree:
                self.page_of[block] = page
        self.swapped_in += len(pages)
        return self.mover.into([(p.host, p.block) for p in pages])

    def keep(self, page: Page) -> None:
        """A page's block becomes known by it."""
        self.page_of[page.block] = page

    def discard(self, page: Page) -> None:
        """A page outside the tree is over: its block, if it is kept, is free."""
        if self.page_of.get(page.block) is page:
            del self.page_of[page.block]
            if page.block in self.blocks.kept:
                self.blocks.forget(page.block)

    def release(self, blocks: list[int]) -> None:
        """One owner less; the blocks of pages are kept."""
        self.blocks.release(blocks, keep=self.page_of)

    def drop_idle(self, pages: list[Page]) -> None:
        """Forget the first of these, each the child of the one before, that nobody holds, and all behind it."""
        for page in pages:
            held = page.block >= 0 and self.blocks.counts[page.block]
            awaited = page.host >= 0 and self.host.counts[page.host]
            if page.in_tree and not held and not awaited:
                self._drop(page)
                return

    def check(self, swapped: list[list[Page]]) -> None:
        """Raise AssertionError unless every page is where it says, and the host's blocks are all accounted for."""
        tables = [[page.host for page in pages] for pages in swapped]
        self.host.check(tables)
        pages = {page for table in swapped for page in table}
        found = set() if self.prefix is None else set(self.prefix.pages())
        assert all(page.in_tree for page in found)
        pages |= found
        assert self.page_at == {p.host: p for p in pages if p.host >= 0}, "a host block has no page"
        assert self.page_of == {p.block: p for p in pages if p.block >= 0}, "a device block has no page"
        assert all(p.stored or p.block >= 0 for p in pages), "a page is nowhere"
        assert self.blocks.kept.keys() <= self.page_of.keys() and self.host.kept.keys() <= self.page_at.keys()
        for page in found:
            if page.parent.tenant is None:
                assert page.parent.in_tree, "a page cannot be found"
                for pool, where in ((self.blocks, "block"), (self.host, "host")):
                    at, above = getattr(page, where), getattr(page.parent, where)
                    if at >= 0 and pool.counts[at]:
                        assert above >= 0 and pool.counts[above], (
                            "a page is held and the one before it is not"
                        )
