"""All of Berth for a module's tests at once: starting it costs seconds, so tests use agents of their own.

``berth``       ready, with two APIs: for tests that leave every process running.
``own_berth``   for one test, with a broker and a database server of its own, which it may stop, freeze and kill.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from api.cli.command_failed import CommandFailed
from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.embedded_postgres import EmbeddedPostgres
from tests.brokers import empty_topics
from tests.conftest import PARTITIONS, unavailable
from tests.integration.http_stack import Stack, stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def berth(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    await empty_topics(kafka.bootstrap, PARTITIONS)
    postgres = _started(tmp_path_factory.mktemp("postgres"))
    try:
        async with stack(kafka, postgres, apis=2) as running:
            yield running
    finally:
        postgres.stop()


@pytest.fixture
async def own_berth(fresh_kafka: EmbeddedKafka, tmp_path: Path) -> AsyncIterator[Stack]:
    postgres = _started(tmp_path / "postgres")
    try:
        async with stack(fresh_kafka, postgres) as running:
            yield running
    finally:
        postgres.stop()


def _started(directory: Path) -> EmbeddedPostgres:
    try:
        return EmbeddedPostgres(directory, port=None).start()
    except CommandFailed as failed:
        unavailable(str(failed))
        raise
