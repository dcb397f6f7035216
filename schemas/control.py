"""What the control topic carries."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from plait.schemas.names import RequestId
from plait.schemas.request import STRICT


class Cancel(BaseModel):
    """End a request, wherever it is. An unknown `request_id` is ignored."""

    model_config = STRICT

    v: Literal[1] = 1
    type: Literal["cancel"] = "cancel"
    request_id: RequestId
