"""How the commands reach the brokers: like the worker, by PLAIT_KAFKA_* for what has no flag."""

from __future__ import annotations

import logging
import os
from typing import Any


def kafka_options(bootstrap_servers: str) -> dict[str, Any]:
    """Arguments of any aiokafka client, security included."""
    from plait.service.kafka import connection
    from plait.service.settings import Settings

    settings = Settings.load(kafka={"bootstrap_servers": bootstrap_servers, "client_id": "plait"})
    return connection(settings.kafka, "cli")


def quiet() -> None:
    """Keep libraries from writing between the lines of a command; PLAIT_DEBUG brings it all back."""
    if os.environ.get("PLAIT_DEBUG"):
        logging.basicConfig(level=logging.DEBUG)
        return
    logging.basicConfig(level=logging.WARNING, format="plait: %(message)s")
    for name in ("aiokafka", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def log_to_stderr() -> None:
    """What a process that stays up has to say, a line at a time."""
    level = logging.DEBUG if os.environ.get("PLAIT_DEBUG") else logging.INFO
    logging.basicConfig(level=level, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if level > logging.DEBUG:
        logging.getLogger("aiokafka").setLevel(logging.WARNING)
        # It asks for each topic it ever wrote to, and complains about those that are gone by now.
        logging.getLogger("aiokafka.cluster").setLevel(logging.CRITICAL)
