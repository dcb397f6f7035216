"""What a response topic already holds of one request, as a reader that follows the epochs sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.schemas import Event, TokensEvent


@dataclass(slots=True)
class Published:
    """Tokens and text of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""


class History:
    """Takes the events of a request in the order of the log.

    An event of an older epoch than one seen before is ignored. A newer epoch that begins at an index which is
    taken replaces what is there from that index on. What comes after a gap does not count: a new run begins at
    the gap.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.epoch = -1
        self._ahead: dict[int, Event] = {}

    def add(self, event: Event) -> None:
        if event.epoch < self.epoch:
            return
        if event.epoch > self.epoch:
            self.epoch = event.epoch
            self._ahead.clear()
            del self.events[event.index :]
        self._ahead.setdefault(event.index, event)
        while not self.finished and (following := self._ahead.pop(len(self.events), None)) is not None:
            self.events.append(following)

    @property
    def finished(self) -> bool:
        """Whether the terminal event is there."""
        return bool(self.events) and not isinstance(self.events[-1], TokensEvent)

    @property
    def torn(self) -> bool:
        """Whether there are events behind a gap."""
        return any(index > len(self.events) for index in self._ahead)

    def progressed_since(self, epoch: int) -> bool:
        """Whether tokens were published in this epoch or a later one."""
        return any(isinstance(e, TokensEvent) and e.token_ids and e.epoch >= epoch for e in self.events)

    def choices(self, n: int) -> list[Published]:
        """What was published of each of `n` choices."""
        found = [Published() for _ in range(n)]
        for event in self.events:
            if isinstance(event, TokensEvent) and event.choice < n:
                found[event.choice].token_ids += event.token_ids
                found[event.choice].text += event.text
        return found
