"""Where a reader is in a stream: a token that it can keep, and go on from after a restart."""

from __future__ import annotations

import base64
import json
from dataclasses import astuple, dataclass
from typing import Self

from plait.schemas import is_request_id, is_topic

VERSION = 1


@dataclass(frozen=True, slots=True)
class Position:
    """Behind one delivered event of one request.

    `offset` is where to read on in the partition, `start` where the request's events begin. `index` is the wire index
    that comes next under `epoch`, `delivered` how many events the reader has had. Where `replay` is set the events
    behind `offset` cannot be understood without those before: read from `start`, and leave out as many as were
    delivered. `ended` is set behind the last event.
    """

    request_id: str
    topic: str
    partition: int
    start: int
    offset: int
    index: int
    epoch: int
    delivered: int
    replay: bool
    ended: bool

    def token(self) -> str:
        """The position as letters, digits, `-` and `_`: `base64url(JSON [version, field, ...])`."""
        text = json.dumps([VERSION, *astuple(self)], separators=(",", ":"))
        return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()

    @classmethod
    def of(cls, token: str) -> Self:
        """Raises ValueError for a token that is none."""
        try:
            padded = token.encode() + b"=" * (-len(token) % 4)
            version, *fields = json.loads(base64.b64decode(padded, b"-_", validate=True))
            position = cls(*fields) if version == VERSION else None
        except (ValueError, TypeError) as error:
            raise ValueError("is no resume token") from error
        if position is None:
            raise ValueError(f"is a resume token of version {version}; known is {VERSION}")
        numbers = (position.partition, position.start, position.offset, position.index, position.delivered)
        if (
            not is_request_id(position.request_id)
            or not is_topic(position.topic)
            or any(type(number) is not int or number < 0 for number in numbers)
            or type(position.epoch) is not int
        ):
            raise ValueError("is no resume token")
        return position
