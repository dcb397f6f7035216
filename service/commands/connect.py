"""How the commands reach the brokers: like the worker, by PLAIT_KAFKA_* for what has no flag."""

from __future__ import annotations

import logging
import os
from typing import Any

# aiokafka shows the requests it sends at DEBUG, and these hold the password.
PASSWORDS = ("SaslAuthenticate",)
# It complains once or more about each response topic that is new, or gone by now.
TOPICS_THAT_COME_AND_GO = ("not found in cluster metadata", "not available during auto-create")


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
        _leave_out("aiokafka.conn", PASSWORDS)
        return
    logging.basicConfig(level=logging.WARNING, format="plait: %(message)s")
    for name in ("aiokafka", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def log_to_stderr() -> None:
    """What a process that stays up has to say, a line at a time."""
    level = logging.DEBUG if os.environ.get("PLAIT_DEBUG") else logging.INFO
    logging.basicConfig(level=level, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _leave_out("aiokafka.conn", PASSWORDS)
    if level > logging.DEBUG:
        logging.getLogger("aiokafka").setLevel(logging.WARNING)
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # tasks that failed unseen
        _leave_out("aiokafka.cluster", TOPICS_THAT_COME_AND_GO)


def _leave_out(logger: str, phrases: tuple[str, ...]) -> None:
    """Keep lines with one of these phrases out of the log."""
    logging.getLogger(logger).addFilter(lambda line: not any(p in line.getMessage() for p in phrases))
