"""A broker that speaks Kafka's protocol, from pip, for `plait demo`, `plait dev` and tests: no Java needed.

It is noida-db, one process of about 10 MB that starts in milliseconds, behind a relay that makes up for what
it lacks (kafka_relay.py). It is not Kafka: it has one node, does not compact, and promises nothing after a
power cut. Run Apache Kafka for anything that matters.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from plait.service.kafka_relay import Relay

PR_SET_PDEATHSIG = 1
# Loaded here: between fork and exec nothing may wait for a lock, the loader's included.
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class EmbeddedBrokerFailed(RuntimeError):
    """The embedded broker is missing or did not start; the message says why."""


class EmbeddedBroker:
    """`async with EmbeddedBroker() as broker:` runs one; clients connect to `broker.bootstrap_servers`.

    `port` 0 takes a free one. Without a `data_dir` the data goes to a temporary folder, removed at the end.
    The broker dies with the process that started it (on Linux, whatever ends that process).
    """

    def __init__(self, data_dir: Path | None = None, port: int = 0) -> None:
        self.port = port
        self._data_dir = data_dir
        self._process: asyncio.subprocess.Process | None = None
        self._relay: Relay | None = None

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def fetches(self) -> int:
        """How often the broker was asked for records."""
        return self._relay.fetches if self._relay is not None else 0

    async def __aenter__(self) -> EmbeddedBroker:
        binary = find_binary()
        self.data_dir = self._data_dir or Path(tempfile.mkdtemp(prefix="plait-broker-"))
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self.log = self.data_dir / "broker.log"
        try:
            await self._start(binary)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self, binary: Path) -> None:
        behind = free_port()
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *[str(binary), "start", "--only", "kafka", "--host", "127.0.0.1"],
                *["--kafka-port", str(behind), "--data-dir", str(self.data_dir)],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                preexec_fn=die_with_parent,
                # Ctrl-C is for the parent, whose last words still go through this broker.
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(15):
                while not await answers(behind):
                    if self._process.returncode is not None:
                        raise EmbeddedBrokerFailed(f"the embedded broker ended at once: {self._last_words()}")
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise EmbeddedBrokerFailed(f"the embedded broker does not answer; see {self.log}") from None
        self._relay = Relay(behind, self.port)
        try:
            self.port = await self._relay.start()
        except OSError as error:
            raise EmbeddedBrokerFailed(f"port {self.port} cannot be used: {error.strerror}") from error

    async def __aexit__(self, *_: object) -> None:
        if self._relay is not None:
            await self._relay.stop()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), 5)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._data_dir is None:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def _last_words(self) -> str:
        return self.log.read_text(errors="replace").strip()[-500:] or "it said nothing"


def find_binary() -> Path:
    """The broker's program inside its package: the console script would put a Python process in between."""
    spec = find_spec("noida_db")
    if spec is None or spec.origin is None:
        raise EmbeddedBrokerFailed(
            "the embedded broker is not installed: pip install 'plait[embedded]', or name a Kafka with "
            "--bootstrap-servers"
        )
    binary = Path(spec.origin).with_name("noida-db.exe" if os.name == "nt" else "noida-db")
    if not binary.is_file():
        raise EmbeddedBrokerFailed(f"the embedded broker's package has no program for {sys.platform}")
    binary.chmod(binary.stat().st_mode | 0o111)
    return binary


def die_with_parent() -> None:
    """To run in a new child process: it ends when the thread that started it does (Linux; see prctl(2))."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def answers(port: int) -> bool:
    """Whether a broker answers an ApiVersions request (version 0)."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(bytes.fromhex("0000000a 0012 0000 00000001 0000"))
        return len(await reader.read(10)) > 0
    except OSError:
        return False
    finally:
        writer.close()
