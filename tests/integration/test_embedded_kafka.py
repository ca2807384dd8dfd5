"""The embedded broker through everything that happens to a program on somebody's machine."""

import asyncio
import itertools
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError
from aiokafka.record.util import calc_crc32c

from api.cli.command_failed import CommandFailed
from api.cli.directory_lock import LOCK_FILE_NAME
from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.embedded_server import DISK_NEEDED_BYTES
from tests.brokers import WAIT_SECONDS, until
from tests.conftest import unavailable

pytestmark = pytest.mark.kafka
TOPIC = "numbers"
REGISTER_BROKER = 27
"""A kind of record in Kafka's own log."""


@pytest.fixture
def broker(kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[EmbeddedKafka]:
    """A broker of the test's own, not started; ``kafka`` is asked for so that the jars are there."""
    one = EmbeddedKafka(tmp_path / "broker", port=None)
    yield one
    one.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", directory], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        unavailable("a small file system can't be mounted here (that needs root)")
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


def mount(options: str, directory: Path) -> None:
    subprocess.run(["mount", "-o", options, str(directory)], check=True)


async def make_topic(kafka: EmbeddedKafka) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(TOPIC, 1, 1)])
    await admin.close()


@asynccontextmanager
async def writing(kafka: EmbeddedKafka, size_bytes: int = 100) -> AsyncIterator[list[int]]:
    """Write numbered records until the end of the block, which must find Kafka running.

    Gives the growing list of those that Kafka has acknowledged.
    """
    acknowledged: list[int] = []
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, acks="all", request_timeout_ms=5000)

    async def write_one(number: int) -> None:
        value = str(number).encode().ljust(size_bytes, b".")
        try:
            await producer.send_and_wait(TOPIC, value, partition=0)
        except KafkaError:
            return  # Kafka has not acknowledged it
        acknowledged.append(number)

    async def write_on() -> None:
        for first in itertools.count(0, 100):
            await asyncio.gather(*(write_one(number) for number in range(first, first + 100)))

    await producer.start()
    task = asyncio.create_task(write_on())
    yield acknowledged
    task.cancel()
    await asyncio.wait([task])
    await asyncio.wait_for(producer.stop(), timeout=20)


async def at_least(count: int, acknowledged: list[int]) -> None:
    async def enough() -> bool:
        return len(acknowledged) >= count

    await until(enough)


async def death_of(kafka: EmbeddedKafka) -> CommandFailed:
    async def died() -> bool:
        return kafka.failure() is not None

    await until(died)
    failure = kafka.failure()
    assert failure is not None
    return failure


async def read_all(kafka: EmbeddedKafka) -> set[int]:
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        partition = TopicPartition(TOPIC, 0)
        consumer.assign([partition])
        end = (await consumer.end_offsets([partition]))[partition]
        found: set[int] = set()
        async with asyncio.timeout(WAIT_SECONDS):
            while await consumer.position(partition) < end:
                for records in (await consumer.getmany(timeout_ms=500)).values():
                    found |= {int(record.value.rstrip(b".")) for record in records}
        return found
    finally:
        await consumer.stop()


async def write(kafka: EmbeddedKafka, numbers: range) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap)
    await producer.start()
    for number in numbers:
        await producer.send_and_wait(TOPIC, str(number).encode(), partition=0)
    await producer.stop()


async def test_stop_and_start_keep_port_and_records(broker: EmbeddedKafka) -> None:
    broker.start()
    bootstrap = broker.bootstrap
    await make_topic(broker)
    await write(broker, range(10))
    broker.restart()
    assert broker.bootstrap == bootstrap
    assert await read_all(broker) == set(range(10))
    broker.stop()
    assert broker.pid is None
    assert broker.failure() is None
    with EmbeddedKafka(broker.directory, port=None) as another:
        assert await read_all(another) == set(range(10))


async def test_kill_in_the_middle_of_writes_loses_nothing_acknowledged(broker: EmbeddedKafka) -> None:
    broker.start()
    await make_topic(broker)
    async with writing(broker) as acknowledged:
        await at_least(2000, acknowledged)
        await asyncio.to_thread(broker.kill)
        before = len(acknowledged)
        await asyncio.to_thread(broker.start)
        await at_least(before + 2000, acknowledged)
    assert set(acknowledged) <= await read_all(broker)


async def test_pause_freezes_and_resume_goes_on(broker: EmbeddedKafka) -> None:
    broker.start()
    await make_topic(broker)
    producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap)
    await producer.start()
    await producer.send_and_wait(TOPIC, b"0", partition=0)
    broker.pause()
    assert psutil.Process(broker.pid).status() == psutil.STATUS_STOPPED
    pending = await producer.send(TOPIC, b"1", partition=0)
    assert (await asyncio.wait([pending], timeout=1.0))[0] == set()
    broker.resume()
    await asyncio.wait_for(pending, timeout=20)
    await producer.stop()
    assert await read_all(broker) == {0, 1}


def test_a_taken_port_is_left_to_its_owner(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    with EmbeddedKafka(tmp_path / "broker", port=kafka.port) as second:
        assert second.port != kafka.port
        assert kafka.pid is not None


def test_a_wished_free_port_is_used(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    with EmbeddedKafka(tmp_path / "first", port=None) as first:
        port = first.port
    with EmbeddedKafka(tmp_path / "second", port=port) as second:
        assert second.port == port


def test_a_port_taken_between_two_starts_is_named_and_no_other_is_used(broker: EmbeddedKafka) -> None:
    broker.start()
    broker.stop()
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", broker.port))
        thief.listen()
        with pytest.raises(CommandFailed, match=str(broker.port)):
            broker.start()
    broker.start()


@pytest.mark.parametrize("which", [0, 1], ids=["port of the broker", "port of the controller"])
def test_a_port_taken_while_the_broker_starts_makes_it_take_another(broker: EmbeddedKafka, which: int) -> None:
    thief = socket.socket()
    stolen: list[int] = []

    def steal() -> None:
        """Take the port as soon as it is chosen: Java needs half a second until it gets there."""
        properties = broker.directory / "server.properties"
        while not (properties.exists() and "advertised.listeners" in properties.read_text()):
            threading.Event().wait(0.001)
        stolen.append([int(port) for port in re.findall(r"://127.0.0.1:([0-9]+)", properties.read_text())][which])
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", stolen[0]))
        thief.listen()

    thread = threading.Thread(target=steal)
    thread.start()
    with thief:
        broker.start()
        thread.join()
        assert stolen != [broker.port]


def test_only_this_machine_can_connect(kafka: EmbeddedKafka) -> None:
    listening = [
        connection.laddr.ip
        for connection in psutil.Process(kafka.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) == 2
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


async def test_what_dead_processes_left_behind_is_not_in_the_way(broker: EmbeddedKafka) -> None:
    broker.start()
    await make_topic(broker)
    broker.kill()  # leaves Kafka's own lock file
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    lock = broker.directory / LOCK_FILE_NAME
    lock.write_text(f'{{"pid": {gone.pid}, "command": "berth up"}}')
    (broker.directory / "data.unfinished" / "piece").mkdir(parents=True)
    broker.start()
    assert await read_all(broker) == set()


def test_an_interrupted_formatting_is_done_again(broker: EmbeddedKafka) -> None:
    unfinished = broker.directory / "data.unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "meta.properties").write_text("version=1\n")
    broker.start()
    assert not unfinished.exists()


async def test_the_directory_may_have_any_name(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    with EmbeddedKafka(tmp_path / "Jürgen's runs, 50% = 日本 #1" / "kafka", port=None) as broker:
        await make_topic(broker)
        broker.restart()
        await write(broker, range(3))
        assert await read_all(broker) == {0, 1, 2}


def test_a_second_broker_in_the_same_directory_is_refused_and_names_the_first(broker: EmbeddedKafka) -> None:
    broker.start()
    with pytest.raises(CommandFailed, match=f"in use by process {os.getpid()}"):
        EmbeddedKafka(broker.directory, port=None).start()
    assert broker.pid is not None


def test_the_broker_outlives_the_thread_that_started_it(broker: EmbeddedKafka) -> None:
    thread = threading.Thread(target=broker.start)
    thread.start()
    thread.join()
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(broker.pid).wait(timeout=2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda how: how.name)
async def test_the_broker_never_outlives_its_parent_and_the_next_start_goes_on(
    broker: EmbeddedKafka, how: signal.Signals
) -> None:
    program = """
        import sys, time
        from pathlib import Path
        from api.cli.embedded_kafka import EmbeddedKafka
        kafka = EmbeddedKafka(Path(sys.argv[1]), port=None).start()
        print(kafka.pid, flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(broker.directory)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    if how is signal.SIGSTOP:  # a frozen broker must end too
        child.suspend()
        how = signal.SIGKILL
    parent.send_signal(how)
    parent.wait(40)
    await asyncio.to_thread(broker.start)  # at once: it waits for the other broker's end
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    await make_topic(broker)
    parent.stdin.close()
    parent.stdout.close()


async def test_a_full_disk_ends_the_broker_with_the_reason_and_the_next_start_recovers(
    kafka: EmbeddedKafka, small_disk: Path
) -> None:
    with EmbeddedKafka(small_disk / "kafka", port=None) as broker:
        await make_topic(broker)
        async with writing(broker, size_bytes=100_000) as acknowledged:
            failure = await death_of(broker)
            assert "disk is full" in failure.happened
            assert "free some space" in failure.advice
            before = len(acknowledged)
            assert before > 0
            with pytest.raises(CommandFailed, match="is full"):
                broker.start()
            mount("remount,size=400m", small_disk)
            await asyncio.to_thread(broker.start)
            await at_least(before + 100, acknowledged)
        assert set(acknowledged) <= await read_all(broker)


async def test_data_of_a_newer_kafka_is_refused_with_the_reason(broker: EmbeddedKafka) -> None:
    broker.start()
    broker.stop()
    log = broker.directory / "data/__cluster_metadata-0/00000000000000000000.log"
    content = bytearray(log.read_bytes())
    start = kind = end = 0
    while kind != REGISTER_BROKER:
        start, end = end, end + 12 + struct.unpack_from(">i", content, end + 8)[0]
        value = start + 61
        for _ in ("length", "attributes", "time", "offset", "key", "value"):  # of one byte each, or more
            while content[value] & 0x80:
                value += 1
            value += 1
        kind = content[value + 1]
    content[value + 2] = 99  # the version of its fields
    struct.pack_into(">I", content, start + 17, calc_crc32c(bytes(content[start + 21 : end])))
    log.write_bytes(content)
    with pytest.raises(CommandFailed, match="written by a newer Kafka than"):
        broker.start()


async def test_a_refused_write_ends_the_broker_with_the_reason_and_the_next_start_recovers(
    broker: EmbeddedKafka,
) -> None:
    broker.start()
    await make_topic(broker)
    async with writing(broker, size_bytes=10_000) as acknowledged:
        await at_least(100, acknowledged)
        assert broker.pid is not None
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))
        failure = await death_of(broker)
        assert "disk is full" in failure.happened
        before = len(acknowledged)
        await asyncio.to_thread(broker.start)
        await at_least(before + 100, acknowledged)
    assert set(acknowledged) <= await read_all(broker)


def test_too_little_space_is_refused_before_anything_is_started(kafka: EmbeddedKafka, small_disk: Path) -> None:
    filling = small_disk / "filling"
    filling.write_bytes(bytes(160 * 2**20 - DISK_NEEDED_BYTES + 2**20))
    broker = EmbeddedKafka(small_disk / "kafka", port=None)
    with pytest.raises(CommandFailed, match="is full") as failed:
        broker.start()
    assert "BERTH_DATA_DIRECTORY" in failed.value.advice
    filling.unlink()
    broker.start()
    broker.stop()


def test_a_file_in_the_way_is_named_and_the_next_start_works(broker: EmbeddedKafka) -> None:
    broker.directory.write_text("in the way")
    with pytest.raises(CommandFailed, match="can't be written") as failed:
        broker.start()
    assert "a file is in the way" in failed.value.advice
    broker.directory.unlink()
    broker.start()


def test_a_read_only_disk_is_named_and_the_next_start_works(kafka: EmbeddedKafka, small_disk: Path) -> None:
    broker = EmbeddedKafka(small_disk / "kafka", port=None)
    broker.start()
    broker.stop()
    mount("remount,ro", small_disk)
    with pytest.raises(CommandFailed, match="can't be written") as failed:
        broker.start()
    assert "read-only" in failed.value.advice
    mount("remount,rw", small_disk)
    broker.start()
    broker.stop()


def test_a_broker_that_ends_at_once_says_why(broker: EmbeddedKafka) -> None:
    unusable = EmbeddedKafka(broker.directory, port=None, overrides={"log.retention.ms": "yesterday"})
    with pytest.raises(CommandFailed, match=r"ended on its own.*yesterday") as failed:
        unusable.start()
    assert str(unusable.log_path) in failed.value.advice
    broker.start()


def test_settings_for_other_java_programs_are_ignored(broker: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Xmx2m")
    monkeypatch.setenv("_JAVA_OPTIONS", "-nonsense")
    broker.start()


def test_a_start_needs_no_network_once_the_jars_are_there(
    broker: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    broker.start()
