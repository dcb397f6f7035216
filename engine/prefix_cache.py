"""What the KV of full blocks is called: by its tokens, by all that came before them, and by the tenant.

A tree of pages, each the child of the page before it (as the radix tree of SGLang, arXiv:2312.07104, in steps of a
block). Looking a page up compares its tokens, so two prompts whose hashes collide get each their own page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Page:
    """The content of one block, and where it lies: in a block of the device, of the host, in both.

    A page outside the tree is known to one sequence alone, and is not found by others.
    """

    parent: Page | None = None
    tokens: tuple[int, ...] = ()
    children: dict[tuple[int, ...], Page] | None = None
    """None until there is one: most pages are made by the hundred and are the last of their kind."""
    in_tree: bool = False
    block: int = -1
    """Of the device's pool; -1 for none."""
    host: int = -1
    """Of the host's pool, and this page's alone; -1 for none."""
    stored: bool = False
    """The host block holds the content; else it is only set aside."""
    tenant: str | None = None
    """Whose tree begins here, of a root alone."""


class PrefixCache:
    """Pages by prefix. Each tenant has a tree of its own, so that nobody learns what another one asked."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.roots: dict[str, Page] = {}

    def root(self, tenant: str) -> Page:
        """The page before the first one, made when it is missing."""
        if tenant not in self.roots:
            self.roots[tenant] = Page(in_tree=True, tenant=tenant)
        return self.roots[tenant]

    def match(self, tenant: str, tokens: Sequence[int], known: list[Page], limit: int) -> list[Page]:
        """The pages of the longest prefix of `tokens` that is there, `limit` at most.

        `known` is what an earlier call gave for the same tokens: what still stands of it is not looked up again.
        """
        pages, size = known[:limit], self.block_size
        while pages and not pages[-1].in_tree:
            pages.pop()
        page = pages[-1] if pages else self.roots.get(tenant)
        while page is not None and page.children and len(pages) < limit:
            at = len(pages) * size
            page = page.children.get(tuple(tokens[at : at + size]))
            if page is not None:
                pages.append(page)
        return pages

    def child(self, parent: Page, tokens: Sequence[int]) -> Page:
        """The page of these tokens after `parent`, made when it is missing."""
        key = tuple(tokens)
        if parent.children is None:
            parent.children = {}
        elif (page := parent.children.get(key)) is not None:
            return page
        page = parent.children[key] = Page(parent, key, None, True)
        return page

    def remove(self, page: Page) -> list[Page]:
        """Take out a page and all that come after it, which cannot be found without it. Gives them, leaves first."""
        above = page.parent
        assert above is not None and above.children
        del above.children[page.tokens]
        if above.tenant is not None and not above.children:
            # A tenant with nothing left costs nothing.
            del self.roots[above.tenant]
        removed = [page]
        for gone in removed:  # grows while it is walked
            gone.in_tree = False
            if gone.children:
                removed += gone.children.values()
                gone.children = None  # or the two would keep each other in memory
        return removed[::-1]

    def pages(self) -> list[Page]:
        found, open_pages = [], list(self.roots.values())
        while open_pages:
            after = (open_pages.pop().children or {}).values()
            found += after
            open_pages += after
        return found
