"""What moves blocks between the device and the host, as the book-keeping sees it."""

from __future__ import annotations

from typing import Protocol

Pairs = list[tuple[int, int]]


class Transfer(Protocol):
    """A copy under way."""

    def done(self) -> bool: ...


class Mover(Protocol):
    """Copies blocks, all layers of each, in the order in which it is told to.

    It may return before a copy is made, as long as no later copy and no iteration sees the difference; the
    iterations' part is `Runner.run`'s, which waits for the copies that concern its blocks.
    """

    ahead: int
    """How many blocks more it copies out when one has to be; 0 where a copy holds up the caller."""

    def out(self, pairs: Pairs) -> None:
        """(device block, host block)"""
        ...

    def into(self, pairs: Pairs) -> Transfer | None:
        """(host block, device block). None when they are there already."""
        ...
