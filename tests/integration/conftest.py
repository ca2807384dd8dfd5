"""All of Berth for a module's tests at once: starting it costs seconds, so tests use agents of their own.

``berth``       ready, with two APIs: for tests that leave every process running.
``own_berth``   for one test, with a broker and a database server of its own, which it may stop, freeze and kill.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import pytest_asyncio

from api.cli.command_failed import CommandFailed
from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.embedded_postgres import EmbeddedPostgres
from tests.brokers import empty_topics
from tests.conftest import PARTITIONS, unavailable
from tests.integration.http_stack import Stack, stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def berth(kafka: EmbeddedKafka) -> AsyncIterator[Stack]:
    await empty_topics(kafka.bootstrap, PARTITIONS)
    with _postgres() as postgres:
        async with stack(kafka, postgres, apis=2) as running:
            yield running


@pytest.fixture
async def own_berth(fresh_kafka: EmbeddedKafka) -> AsyncIterator[Stack]:
    with _postgres() as postgres:
        async with stack(fresh_kafka, postgres) as running:
            yield running


@contextmanager
def _postgres() -> Iterator[EmbeddedPostgres]:
    """A server beside pytest's own directories: every pytest that starts closes those for other users."""
    with TemporaryDirectory(prefix="berth-test-", ignore_cleanup_errors=True) as directory:
        postgres = EmbeddedPostgres(Path(directory) / "postgres", port=None)
        try:
            postgres.start()
        except CommandFailed as failed:
            unavailable(str(failed))
            raise
        try:
            yield postgres
        finally:
            postgres.stop()
