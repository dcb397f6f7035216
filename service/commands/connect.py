"""How the commands reach the brokers: like the worker, by PLAIT_CONFIG and PLAIT_KAFKA_* for what has no flag."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.service.settings import Settings

# aiokafka shows the requests it sends at DEBUG, and these hold the password.
PASSWORDS = ("SaslAuthenticate",)
# It tries a broker that is away twice a second, and says so each time.
BROKER_AWAY = "Unable connect to"
BROKER_AWAY_S = 10.0
# It complains once or more about each response topic that is new, or gone by now.
TOPICS_THAT_COME_AND_GO = ("not found in cluster metadata", "not available during auto-create")


def kafka_options(bootstrap_servers: str) -> dict[str, Any]:
    """Arguments of any aiokafka client, security included."""
    from plait.service.kafka import connection

    return connection(settings_of(bootstrap_servers).kafka, "cli")


def settings_of(bootstrap_servers: str) -> Settings:
    """What file and environment say, for these brokers."""
    from plait.service.settings import Settings

    given = {"bootstrap_servers": bootstrap_servers, "client_id": "plait"}
    return Settings.load(os.environ.get("PLAIT_CONFIG") or None, kafka=given)


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
        _thin_out("aiokafka", BROKER_AWAY, BROKER_AWAY_S)


def _leave_out(logger: str, phrases: tuple[str, ...]) -> None:
    """Keep lines with one of these phrases out of the log."""
    logging.getLogger(logger).addFilter(lambda line: not any(p in line.getMessage() for p in phrases))


def _thin_out(logger: str, phrase: str, seconds: float) -> None:
    """Of lines with this phrase that say the same, keep one in so many seconds."""
    said: dict[str, float] = {}

    def keep(line: logging.LogRecord) -> bool:
        text = line.getMessage()
        if phrase not in text:
            return True
        now = time.monotonic()
        if now < said.get(text, float("-inf")) + seconds:
            return False
        said[text] = now
        return True

    logging.getLogger(logger).addFilter(keep)
