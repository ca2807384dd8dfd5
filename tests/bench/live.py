"""Live events: deliveries per second over all clients, and how long after its commit a decision reaches them.

``berth api`` is a real process. Decisions are written by this program in transactions, as a worker writes them, so that
the moment of each commit is known: just before it is asked for, which counts the commit itself in. Clients are another
process, which notes when each event has come. A plain consumer with committed reads is beside them: what Kafka alone
takes, in the same run.

    python -m tests.bench.live [--seconds 10]
"""

import argparse
import asyncio
import itertools
import json
import re
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from api.cli.embedded_kafka import EmbeddedKafka
from api.http.auth import Authentication
from streams import DECISIONS
from streams.codec import partition_of
from streams.kafka import topics
from tests.bench.processes import Child, child, other_cpu, say, words

PARTITIONS: Final = 8
AGENTS: Final = 64
TARGET_PER_SECOND: Final = 5_000
TARGET_P99_MILLISECONDS: Final = 200
FLOOD_DELIVERIES: Final = 100_000
DECISION: Final = {
    "type": "decision", "v": 1, "via": "kafka", "cause": {"topic": "berth.triggers", "partition": 3, "offset": 123456},
    "command": {"type": "trigger", "v": 1, "id": "0" * 36, "conversation_id": "0" * 36, "filler": "x" * 350},
    "events": [{"type": "accepted", "trigger_id": "0" * 36}, {"type": "placed"}, {"type": "dispatched"}],
    "policy": "1", "prev": "0" * 64,
}  # fmt: skip
"""As long as a real one, about 900 bytes with what each has of its own."""


async def live(bootstrap: str, seconds: float = 10.0) -> dict[str, Any]:
    """By number of clients: deliveries per second flat out, and milliseconds after the commit at half the target."""
    secret = secrets.token_urlsafe(48)
    token = Authentication("HS256", secret.encode(), "berth", None).issue("bench", "admin", ["*"], 1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="berth-bench-") as directory:
        environment = {
            "BERTH_KAFKA": bootstrap,
            "BERTH_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/nothing",
            "BERTH_JWT_SECRET": secret,
            "BERTH_DATA_DIRECTORY": directory,
        }
        async with child("api.cli", "api", "--port", "0", **environment) as api, _writer(bootstrap) as writer:
            address = (await api.event("api_listens"))[1]["page"].rpartition(":")[2].strip("/")
            await api.event("log_connected")
            for clients in (100, 1_000):
                before_bytes = api.memory_bytes()
                async with child("tests.bench.live", "clients", address, str(clients), token) as crowd:
                    await crowd.event("connected")
                    of_one = (api.memory_bytes() - before_bytes) / clients
                    rates = {"half": TARGET_PER_SECOND / 2 / clients, "full": TARGET_PER_SECOND / clients}
                    for name, rate in rates.items():
                        found[f"{clients} clients, {name}"] = await _steadily(writer, crowd, clients, rate, seconds)
                    found[f"{clients} clients, flat out"] = await _flat_out(writer, crowd, clients)
                    found[f"{clients} clients, memory"] = {"kib_of_an_idle_client": round(of_one / 1024, 1)}
    return found


class Writer:
    """Writes decisions, one or several in a transaction, and knows when each was about to be committed."""

    def __init__(self, bootstrap: str) -> None:
        self.committed_at: dict[int, float] = {}
        self.read_at: dict[int, float] = {}
        """When a plain consumer had it."""
        self._numbers = itertools.count()
        self._producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap, transactional_id="bench-live", retry_backoff_ms=5, linger_ms=0
        )
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False
        )

    async def start(self) -> None:
        await self._producer.start()
        await self._consumer.start()
        self._consumer.assign([TopicPartition(DECISIONS.name, number) for number in range(PARTITIONS)])
        await self._consumer.seek_to_end()

    async def stop(self) -> None:
        await self._consumer.stop()
        await self._producer.stop()

    async def write(self, count: int) -> list[int]:
        """So many decisions in one transaction; their numbers."""
        numbers = [next(self._numbers) for _ in range(count)]
        await self._producer.begin_transaction()
        sends = [await self._send(number) for number in numbers]
        await asyncio.gather(*sends)
        self.committed_at.update(dict.fromkeys(numbers, time.monotonic()))
        await self._producer.commit_transaction()
        return numbers

    async def _send(self, number: int) -> "asyncio.Future[Any]":
        agent_id = f"agent-{number % AGENTS}"
        value = json.dumps({**DECISION, "agent_id": agent_id, "seq": number}, separators=(",", ":")).encode()
        sent: asyncio.Future[Any] = await self._producer.send(
            DECISIONS.name, value, agent_id.encode(), partition_of(agent_id, PARTITIONS)
        )
        return sent

    async def read(self) -> None:
        """Note when a plain consumer has each decision, until cancelled."""
        async for record in self._consumer:
            self.read_at[_seq(record.value)] = time.monotonic()


@asynccontextmanager
async def _writer(bootstrap: str) -> AsyncIterator[Writer]:
    writer = Writer(bootstrap)
    await writer.start()
    reading = asyncio.create_task(writer.read())
    try:
        yield writer
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await writer.stop()


async def _steadily(writer: Writer, crowd: Child, clients: int, per_second: float, seconds: float) -> dict[str, Any]:
    began = time.monotonic()
    numbers: list[int] = []
    with other_cpu() as others:
        for index in range(int(per_second * seconds)):
            await asyncio.sleep(began + index / per_second - time.monotonic())
            numbers += await writer.write(1)
        arrivals = await _arrivals(crowd, len(numbers) * clients)
    late = sorted(at - writer.committed_at[number] for number, at in arrivals if number in set(numbers))
    plain = sorted(writer.read_at[number] - writer.committed_at[number] for number in numbers)
    assert len(late) == len(numbers) * clients, f"{len(late)} deliveries of {len(numbers)} decisions"
    return {
        "deliveries_per_second": round(len(late) / (time.monotonic() - began)),
        "p50_ms": _milliseconds(late, 0.5),
        "p99_ms": _milliseconds(late, 0.99),
        "max_ms": _milliseconds(late, 1.0),
        "plain_p50_ms": _milliseconds(plain, 0.5),
        "plain_p99_ms": _milliseconds(plain, 0.99),
        "other_cpu": others.cores,
    }


async def _flat_out(writer: Writer, crowd: Child, clients: int) -> dict[str, Any]:
    """Deliveries per second from the commit of the first to the arrival of the last, many decisions at once."""
    numbers: list[int] = []
    with other_cpu() as others:
        while len(numbers) * clients < FLOOD_DELIVERIES:
            numbers += await writer.write(20)
        arrivals = await _arrivals(crowd, len(numbers) * clients)
    wanted = set(numbers)
    came = [at for number, at in arrivals if number in wanted]
    assert len(came) == len(numbers) * clients, f"{len(came)} deliveries of {len(numbers)} decisions"
    per_second = len(came) / (max(came) - writer.committed_at[numbers[0]])
    return {
        "deliveries_per_second": round(per_second),
        "of_target": round(per_second / TARGET_PER_SECOND, 2),
        "other_cpu": others.cores,
    }


async def _arrivals(crowd: Child, count: int) -> Sequence[tuple[int, float]]:
    """What came since the last time, when it is so much."""
    before = sum(entry[1].get("event") == "arrived" for entry in crowd.events)
    crowd.tell(str(count))
    _, said = await crowd.event("arrived", before + 1)
    return [(number, at) for number, at in said["arrivals"]]


def _milliseconds(ordered: Sequence[float], share: float) -> float:
    return round(1000 * ordered[min(len(ordered) - 1, int(len(ordered) * share))], 1)


_SEQ: Final = re.compile(rb'"seq":(\d+)')


def _seq(value: bytes) -> int:
    found = _SEQ.search(value)
    assert found is not None
    return int(found[1])


# -- the clients' process ---------------------------------------------------------------------------------------------


class _Client(asyncio.Protocol):
    """One connection: notes when each event came, and asks for nothing else."""

    def __init__(self, crowd: "_Crowd") -> None:
        self._crowd = crowd
        self._rest = b""
        self._is_connected = False

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self._is_connected and b"retry: " in data:
            self._is_connected = True
            self._crowd.connected()
        data = self._rest + data
        end = data.rfind(b"\n\n") + 2
        if end == 1:
            self._rest = data
            return
        self._rest = data[end:]
        for number in _SEQ.findall(data, 0, end):
            self._crowd.arrived(int(number), now)

    def connection_lost(self, exc: Exception | None) -> None:
        """The service has ended it; the count of deliveries will show it."""


class _Crowd:
    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._connected = 0
        self._arrivals: list[tuple[int, float]] = []
        self._moved = asyncio.Event()

    def connected(self) -> None:
        self._connected += 1
        if self._connected == self._clients:
            say("connected")

    def arrived(self, number: int, at: float) -> None:
        self._arrivals.append((number, at))
        self._moved.set()

    async def told(self, count: int) -> None:
        """Say everything when so much has come, or nothing has come for a while."""
        try:
            while len(self._arrivals) < count:
                self._moved.clear()
                async with asyncio.timeout(20):
                    await self._moved.wait()
        except TimeoutError:
            pass
        say("arrived", arrivals=self._arrivals)
        self._arrivals = []


async def _follow(port: int, clients: int, token: str) -> None:
    crowd = _Crowd(clients)
    loop = asyncio.get_running_loop()
    request = f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    for _ in range(clients):
        transport, _ = await loop.create_connection(lambda: _Client(crowd), "127.0.0.1", port)
        transport.write(request)
    async for word in words():
        await crowd.told(int(word))


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="berth-bench-") as directory:
        kafka = EmbeddedKafka(Path(directory) / "kafka", port=None).start()
        try:
            await topics.create(kafka.bootstrap, PARTITIONS)
            found = await live(kafka.bootstrap, given.seconds)
        finally:
            kafka.stop()
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["clients"]:
        asyncio.run(_follow(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
    else:
        asyncio.run(_main())
