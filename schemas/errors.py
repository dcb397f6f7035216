"""What can be wrong with a message, and how that is said."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """The codes of `error` events."""

    INVALID_REQUEST = "invalid_request"
    PROMPT_TOO_LONG = "prompt_too_long"
    MODEL_NOT_FOUND = "model_not_found"
    OVERLOADED = "overloaded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class WireError(ValueError):
    """A message that is not of the wire.

    `field` is the path of the first problem (`sampling.temperature`, `messages[2].content`), empty when the
    message as a whole is at fault. `request_id`, `response_topic` and `content_type` are what could be read
    of them, and only when valid: with a `request_id` the sender can be answered, without one nobody can.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        code: ErrorCode = ErrorCode.INVALID_REQUEST,
        request_id: str | None = None,
        response_topic: str | None = None,
        content_type: str | None = None,
    ) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field
        self.code = code
        self.request_id = request_id
        self.response_topic = response_topic
        self.content_type = content_type
