"""Puts the events of one request in order: no gap, no duplicate, whichever worker published them."""

from __future__ import annotations

from plait.schemas import Event, TokensEvent


class Forgotten(Exception):
    """A newer epoch goes back to an event from before this reader's beginning: what it delivered is not known."""


class EventOrder:
    """One request's events by (index, epoch), as a reader of the response topic meets them.

    An event of an older epoch comes from a worker that lost the request and is ignored. A newer epoch may
    begin at an index that was already delivered, when the older worker's event arrived after the new one had
    read the topic: both continue the same tokens, so what was delivered is cut off the newer events.
    Delivered events are numbered 0, 1, 2, ... even then.

    A reader that goes on where an earlier one was gives the wire's `next` index, its `epoch`, and how many events
    were `delivered`.
    """

    def __init__(self, next: int = 0, epoch: int = -1, delivered: int = 0) -> None:
        self.next = next
        self.epoch = epoch
        self.delivered = delivered
        self._base = next  # what came before this index is not in `_sizes`
        self._held: dict[int, Event] = {}
        self._sizes: list[tuple[int, int, int]] = []
        self._skip: dict[int, tuple[int, int]] = {}

    @property
    def gap(self) -> bool:
        """Whether a later event waits for one that is missing."""
        return bool(self._held)

    @property
    def _cutting(self) -> bool:
        return any(tokens or characters for tokens, characters in self._skip.values())

    def add(self, event: Event) -> list[Event]:
        """Take one event from the topic; returns those that can be delivered now, in order. Raises Forgotten."""
        return [ready for ready, _, _ in self.take(event)]

    def take(self, event: Event) -> list[tuple[Event, int, bool]]:
        """`add`; with each event the wire's index that follows it, and whether something of what follows was delivered
        before."""
        if event.epoch < self.epoch:
            return []
        if event.epoch > self.epoch:
            self._change_epoch(event)
        if event.index < self.next:
            return []
        self._held.setdefault(event.index, event)
        ready = []
        while (following := self._held.pop(self.next, None)) is not None:
            self.next += 1
            fresh = self._cut(following)
            if fresh is not None:
                if fresh.index != self.delivered:
                    fresh = fresh.model_copy(update={"index": self.delivered})
                ready.append((fresh, self.next, self._cutting))
                self.delivered += 1
        return ready

    def _change_epoch(self, event: Event) -> None:
        if event.index < self._base:
            raise Forgotten
        self.epoch = event.epoch
        self._held.clear()
        known = event.index - self._base
        for choice, tokens, characters in self._sizes[known:]:
            old = self._skip.get(choice, (0, 0))
            self._skip[choice] = (old[0] + tokens, old[1] + characters)
        del self._sizes[known:]
        self.next = min(self.next, event.index)

    def _cut(self, event: Event) -> Event | None:
        """The event without what was delivered before; None when nothing is left of it."""
        if not isinstance(event, TokensEvent):
            return event
        self._sizes.append((event.choice, len(event.token_ids), len(event.text)))
        tokens, characters = self._skip.get(event.choice, (0, 0))
        if not tokens and not characters:
            return event
        left = (max(0, tokens - len(event.token_ids)), max(0, characters - len(event.text)))
        self._skip[event.choice] = left
        token_ids, text = event.token_ids[tokens:], event.text[characters:]
        if not token_ids and not text:
            return None
        logprobs = event.logprobs[tokens:] if event.logprobs else event.logprobs
        return event.model_copy(update={"token_ids": token_ids, "text": text, "logprobs": logprobs})
