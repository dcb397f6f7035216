"""A real Apache Kafka for tests: KRaft nodes from Maven Central's jars, on free ports, in folders of their own.

Needs Java 17 or newer and, the first time, Maven.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest
from confluent_kafka.admin import AdminClient
from filelock import FileLock

from kafka_secure import Secure
from plait.service.embedded import die_with_parent, free_port

HERE = Path(__file__).parent / "kafka"
CLUSTER_ID = "cGxhaXQtdGVzdC1jbHVzdA"
JVM = ["-Xms64m", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]

# Short timeouts are allowed, so that tests of lost members need not wait; few internal partitions start fast.
PROPERTIES = """\
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners={listeners}
advertised.listeners={advertised}
controller.listener.names=CONTROLLER
log.dirs={data}
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=500
offsets.topic.num.partitions=1
offsets.topic.replication.factor={replicas}
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor={replicas}
transaction.state.log.min.isr={in_sync}
default.replication.factor={replicas}
min.insync.replicas={in_sync}
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
log.retention.check.interval.ms=1000
log.initial.task.delay.ms=1000
"""


class KafkaBroker:
    """One node that can be stopped, killed and started again on the same port with the same data.

    `voters` are (node, controller's port) of all nodes of its cluster; alone it is node 1 of one.
    """

    def __init__(
        self,
        directory: Path,
        secure: Secure | None = None,
        node: int = 1,
        voters: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        voters = voters or [(node, free_port())]
        self.node = node
        self.directory = directory
        self.port = free_port()
        self.bootstrap_servers = f"127.0.0.1:{self.port}"
        self.secure = secure
        self.log = directory / "kafka.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._config = directory / "server.properties"
        data = directory / "data"
        data.mkdir(parents=True)
        # What `kafka-storage format` writes; it would start a Java of its own for these lines.
        (data / "meta.properties").write_text(f"version=1\ncluster.id={CLUSTER_ID}\nnode.id={node}\n")
        advertised = ",".join(
            [f"PLAINTEXT://{self.bootstrap_servers}", *([secure.listeners()] if secure else [])]
        )
        properties = PROPERTIES.format(
            node=node,
            voters=",".join(f"{n}@127.0.0.1:{port}" for n, port in voters),
            listeners=f"{advertised},CONTROLLER://127.0.0.1:{dict(voters)[node]}",
            advertised=advertised,
            data=data,
            replicas=len(voters),
            in_sync=(len(voters) + 1) // 2,
        )
        self._config.write_text(properties + (secure.properties() if secure else ""))

    def start(self, timeout: float = 90) -> None:
        """Start the node and wait until it answers."""
        self.launch()
        self.wait(timeout)

    def launch(self) -> None:
        """The node ends with the thread that calls this."""
        with self.log.open("ab") as log:
            self._process = spawn(java("kafka.Kafka", str(self._config)), log)

    def wait(self, timeout: float = 90) -> None:
        assert self._process is not None
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


class KafkaCluster:
    """Nodes of one cluster, each a broker and a controller; topics have a replica on each."""

    def __init__(self, directory: Path, size: int = 3) -> None:
        voters = [(node, free_port()) for node in range(1, size + 1)]
        self.nodes = [KafkaBroker(directory / f"node{node}", node=node, voters=voters) for node, _ in voters]
        self.bootstrap_servers = ",".join(node.bootstrap_servers for node in self.nodes)

    def start(self) -> None:
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            node.wait()

    def heal(self, timeout: float = 60) -> None:
        """Wait until every replica is in sync again."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        deadline = time.monotonic() + timeout
        while True:
            topics = admin.list_topics(timeout=30).topics
            partitions = [p for topic in topics.values() for p in topic.partitions.values()]
            if partitions and all(len(p.isrs) == len(self.nodes) for p in partitions):
                return
            if time.monotonic() > deadline:
                pytest.fail(f"replicas are missing: {[(p.replicas, p.isrs) for p in partitions]}")
            time.sleep(0.1)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


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


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """One real Kafka for the whole session, with TLS and SASL at further ports; give topics and groups names of
    their own."""
    folder = tmp_path_factory.mktemp("kafka")
    broker = KafkaBroker(folder / "broker", Secure(folder / "certificates"))
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[KafkaBroker]:
    """A real Kafka for one test alone, which may stop, kill and restart it."""
    broker = KafkaBroker(tmp_path / "kafka")
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()


@pytest.fixture(scope="module")
def kafka_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """Three nodes; a test that kills one starts it again."""
    cluster = KafkaCluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()
