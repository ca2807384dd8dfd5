"""Real services for the tests. None is mocked; one that can't be had skips its tests, or fails them in CI.

``kafka``        one broker for the whole run: for tests that don't touch it, with topics of their own making.
``topics``       that broker with every topic of Berth new and empty (0.3 s): for tests of workers and commands.
``fresh_kafka``  a broker of the test's own with new topics (2 s): for tests that kill, pause or restart it, or that
                 kill workers and can't wait until the group has forgotten them.
``postgres``     one PostgreSQL server for the whole run: for tests that don't touch it.
``database``     URL of a new, empty database on it (50 ms).
``store``        the tables of the projections in such a database, empty.
``seed``         one number for everything random in a test; printed, and chosen with --hypothesis-seed.
"""

import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import hypothesis
import psycopg
import pytest

from api.cli.command_failed import CommandFailed
from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.embedded_postgres import EmbeddedPostgres
from projections.store import Store
from streams.kafka import topics as kafka_topics
from tests.brokers import empty_topics

PARTITIONS = 8

# A slow machine is no failure, and a failure is to be repeated by its seed or its blob.
hypothesis.settings.register_profile(
    "berth", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("berth")


# What a shell starts in the background ignores Ctrl-C, and so does every program that it starts: also those of tests
# that press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    """Say the seed at the top of every run."""
    return f"berth: seed {_seed(config)} (again with: make test SEED={_seed(config)})"


def unavailable(why: str) -> None:
    """Skip the test, or fail it where BERTH_REQUIRE_SERVICES says that every service must be there."""
    if os.environ.get("BERTH_REQUIRE_SERVICES") == "1":
        pytest.fail(f"BERTH_REQUIRE_SERVICES=1, and {why}")
    pytest.skip(why)


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    broker = _started(tmp_path_factory.mktemp("kafka"))
    yield broker
    broker.stop()


@pytest.fixture
async def topics(kafka: EmbeddedKafka) -> EmbeddedKafka:
    failure = kafka.failure()
    if failure is not None:
        raise failure
    await empty_topics(kafka.bootstrap, PARTITIONS)
    return kafka


@pytest.fixture
async def fresh_kafka(tmp_path: Path) -> AsyncIterator[EmbeddedKafka]:
    broker = _started(tmp_path / "kafka")
    await kafka_topics.create(broker.bootstrap, PARTITIONS)
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    # Not below pytest's directory, which every start of pytest closes to the user that the server runs as for root.
    with tempfile.TemporaryDirectory(prefix="berth-postgres-") as directory:
        try:
            server = EmbeddedPostgres(Path(directory), port=None).start()
        except CommandFailed as failed:
            unavailable(str(failed))
            raise
        yield server
        server.stop()


@pytest.fixture
def database(postgres: EmbeddedPostgres) -> Iterator[str]:
    name = f"test_{next(_database_numbers)}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} STRATEGY file_copy")
    yield urlunsplit(urlsplit(postgres.url)._replace(path=f"/{name}"))
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    opened = Store(database)
    opened.open()
    yield opened
    opened.close()


_database_numbers: Final = itertools.count(1)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    number = _seed(request.config)
    print(f"seed {number}")  # noqa: T201 - shown by pytest when the test fails
    return number


def _seed(config: pytest.Config) -> int:
    return int(config.getoption("--hypothesis-seed") or 0)


def _started(directory: Path) -> EmbeddedKafka:
    try:
        return EmbeddedKafka(directory, port=None).start()
    except CommandFailed as failed:
        unavailable(str(failed))
        raise
