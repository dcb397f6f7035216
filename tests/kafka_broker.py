"""A real Apache Kafka for tests: one KRaft node from Maven Central's jars, on free ports, in its own folder.

Needs Java 17 or newer and, the first time, Maven.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from filelock import FileLock

from plait.service.embedded import die_with_parent, free_port

HERE = Path(__file__).parent / "kafka"
CLUSTER_ID = "cGxhaXQtdGVzdC1jbHVzdA"
JVM = ["-Xms128m", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]

# Short timeouts are allowed, so that tests of lost members need not wait; few internal partitions start fast.
PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={data}
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=500
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
log.retention.check.interval.ms=1000
log.initial.task.delay.ms=1000
"""


class KafkaBroker:
    """One node that can be stopped, killed and started again on the same port with the same data."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.bootstrap_servers = f"127.0.0.1:{self.port}"
        self.log = directory / "kafka.log"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self._config = directory / "server.properties"
        self._config.write_text(
            PROPERTIES.format(port=self.port, controller=free_port(), data=directory / "data")
        )
        done = subprocess.run(
            java("kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(self._config)),
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            pytest.fail(f"Kafka's storage could not be formatted: {done.stdout}{done.stderr}")

    def start(self, timeout: float = 90) -> None:
        """Start the node and wait until it answers."""
        with self.log.open("ab") as log:
            self._process = spawn(java("kafka.Kafka", str(self._config)), log)
        deadline = time.monotonic() + timeout
        while not answers(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"Kafka did not start; the end of {self.log}:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Shut down in order, as an operator does."""
        self._end("terminate")

    def kill(self) -> None:
        """End at once, as a power cut does."""
        self._end("kill")

    def _end(self, how: str) -> None:
        if self._process is not None:
            getattr(self._process, how)()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def spawn(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
    )


def java(*arguments: str) -> list[str]:
    """A command line that runs a main class of Kafka's."""
    binary = shutil.which("java")
    if binary is None:
        pytest.fail("these tests run a real Apache Kafka: install Java 17 or newer (openjdk-17-jre-headless)")
    logging = f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}"
    return [binary, *JVM, logging, "-cp", f"{jars()}/*", *arguments]


def jars() -> Path:
    """The folder of Kafka's jars, fetched once for all checkouts."""
    pom = HERE / "pom.xml"
    cache = Path(os.environ.get("PLAIT_CACHE") or "~/.cache/plait").expanduser()
    target = cache / f"kafka-{hashlib.sha256(pom.read_bytes()).hexdigest()[:12]}"
    if target.is_dir():
        return target
    maven = shutil.which("mvn")
    if maven is None:
        pytest.fail("these tests fetch Apache Kafka from Maven Central: install Maven")
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            part = target.with_name(f"{target.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={part}"]
            done = subprocess.run([maven, "-q", "-B", "-f", str(pom), *goal], capture_output=True, text=True)
            if done.returncode != 0:
                pytest.fail(f"Maven could not fetch Apache Kafka: {done.stdout[-3000:]}{done.stderr[-1000:]}")
            part.rename(target)
    return target


def answers(port: int) -> bool:
    """Whether a broker answers an ApiVersions request (version 0)."""
    try:
        with socket.create_connection(("127.0.0.1", port), 2) as connection:
            connection.sendall(bytes.fromhex("0000000a 0012 0000 00000001 0000"))
            return len(connection.recv(10)) > 0
    except OSError:
        return False


def running_broker(directory: Path) -> Iterator[KafkaBroker]:
    broker = KafkaBroker(directory)
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """One real Kafka for the whole session; give topics and groups names of their own."""
    yield from running_broker(tmp_path_factory.mktemp("kafka"))


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[KafkaBroker]:
    """A real Kafka for one test alone, which may stop, kill and restart it."""
    yield from running_broker(tmp_path / "kafka")
