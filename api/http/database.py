"""The read side in Postgres: named queries on a pool of read-only connections, and how far the projection is.

One connection listens for the projector's notifications and keeps the projection's positions; a read with a
``min_position`` waits for them there instead of asking the database again and again. The same loop notices when the
database is away: nothing else has to.

Several queries of one answer see one state of the database (REPEATABLE READ).
"""

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from importlib import resources
from typing import Any, Final, Generic, LiteralString, TypeVar, cast

import psycopg
import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow, dict_row, tuple_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from api.http.answers import OUTCOME_TYPES, AnyDecision, Outgoing
from api.http.positions import LogPosition
from projections.past import Concluded, Questions, Rows, advance
from projections.schema import CONNECT_TIMEOUT_SECONDS, LIVE_SCHEMA
from projections.store import CHANNEL
from streams import DECISIONS, SITE_DECISIONS, Topic
from streams.rules.events import read_decision
from streams.rules.site_events import read_site_decision

POOL_CONNECTIONS_MAX: Final = 8
POOL_WAIT_SECONDS: Final = 2.0
READ_SECONDS_MAX: Final = 2.5
LOOK_BACK_WAIT_SECONDS: Final = 1.0
MIN_POSITION_SECONDS_MAX: Final = 2.0
REFRESH_SECONDS: Final = 0.5
RECONNECT_SECONDS: Final = 0.5

_OPTIONS: Final[dict[str, Any]] = {
    "application_name": "berth-api",
    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "options": f"-c search_path={LIVE_SCHEMA} -c timezone=UTC",
}

log = structlog.get_logger()
Result = TypeVar("Result")


def _load_queries() -> dict[str, LiteralString]:
    """The queries of the projections by name."""
    text = (resources.files("projections") / "queries.sql").read_text()
    parts = cast("list[LiteralString]", re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)[1:])
    return {name: query.strip().removesuffix(";") for name, query in zip(parts[::2], parts[1::2], strict=True)}


_OF_PROJECTIONS: Final = _load_queries()
_DECISION_TEXTS: Final = (
    "SELECT seq, log_partition, log_offset, record::text AS record FROM (PAGE) AS page ORDER BY seq"
)
_OURS: Final[dict[str, LiteralString]] = {
    # max and active by agent, as the text of one JSON object: that is all that is wanted of a thousand rows.
    "slots_as_json": """
        SELECT coalesce(json_object_agg(agent_id, json_build_object('max', max_parallel, 'active', running)), '{}')
               ::text
          FROM (slots_of_agents_page) AS page
        """.replace("slots_of_agents_page", _OF_PROJECTIONS["slots_of_agents_page"]),
    # Decisions with their records as text: they are handed on as they are.
    "decision_texts_of_agent_page": _DECISION_TEXTS.replace("PAGE", _OF_PROJECTIONS["decisions_of_agent_page"]),
    "decision_texts_of_id_page": _DECISION_TEXTS.replace("PAGE", _OF_PROJECTIONS["decisions_of_id_page"]),
    "site_decision_as_text": "SELECT record::text FROM site_decisions WHERE site = %(site)s AND seq = %(seq)s",
    # How much an organization or department has granted at a site, whether its gate was ever changed or not.
    "gate_granted": """
        SELECT count(*) AS granted
          FROM site_claims
         WHERE site = %(site)s AND granted_at IS NOT NULL
           AND CASE %(scope)s::text WHEN 'organization' THEN organization_id ELSE department_id END = %(gate_name)s""",
    # Live triggers by filters (null: any), oldest first.
    "live_triggers": """
        SELECT agent_id, trigger_id
          FROM triggers
         WHERE ended_at IS NULL AND accepted_at >= %(since)s
           AND (%(visible)s::text[] IS NULL OR agent_id = ANY(%(visible)s::text[]))
           AND (%(state)s::text IS NULL OR state = %(state)s)
           AND (%(kind)s::text IS NULL OR kind = %(kind)s)
           AND (%(organization_id)s::text IS NULL OR organization_id = %(organization_id)s)
         ORDER BY accepted_at, agent_id, trigger_id
         LIMIT %(max_rows)s""",
    # Which of some attempts have ended.
    "ended_attempts": """
        SELECT execution_id FROM attempts
         WHERE ended_at IS NOT NULL AND (agent_id, trigger_id, execution_id) IN (
               SELECT * FROM unnest(%(agent_ids)s::text[], %(trigger_ids)s::text[], %(execution_ids)s::text[]))""",
    # When the oldest attempt of some agents (null: of any) that still runs was dispatched.
    "oldest_running_attempt": """
        SELECT min(dispatched_at)
          FROM attempts
         WHERE ended_at IS NULL AND (%(agent_ids)s::text[] IS NULL OR agent_id = ANY(%(agent_ids)s::text[]))""",
    # Dead letters, newest first before a cursor, with the beginning of each.
    "dead_letters_begun_page": """
        SELECT log_partition, log_offset, written_at, reason, source_topic, source_partition, source_offset,
               octet_length(key) AS key_bytes, octet_length(value) AS value_bytes,
               substring(key FOR 200) AS key, substring(value FOR 200) AS value
          FROM dead_letters
         WHERE (written_at, log_partition, log_offset)
               < (%(before_written_at)s, %(before_partition)s, %(before_offset)s)
         ORDER BY written_at DESC, log_partition DESC, log_offset DESC
         LIMIT %(max_rows)s""",
    # How far an agent's decisions are applied, and when it was made; no row: it has none.
    "newest_decision_of_agent": "SELECT seq, decided_at, created_at FROM agents WHERE agent_id = %(agent_id)s",
    "message_previews": """
        SELECT trigger_id, left(content #>> '{}', 100) AS message_preview
          FROM texts
         WHERE agent_id = %(agent_id)s AND trigger_id = ANY(%(trigger_ids)s::text[]) AND execution_id = ''
           AND kind = 'message'""",
    "last_verification": "SELECT verified_at, result FROM last_verification",
    "dead_letter": """
        SELECT *, octet_length(key) AS key_bytes, octet_length(value) AS value_bytes
          FROM dead_letters
         WHERE log_partition = %(partition)s AND log_offset = %(offset)s""",
    # The decision in which a trigger ended: none while it lives.
    "end_of_trigger": """
        SELECT decisions.record::text
          FROM triggers
          JOIN decision_ids ON decision_ids.agent_id = triggers.agent_id AND decision_ids.id = triggers.trigger_id
          JOIN decisions ON decisions.agent_id = decision_ids.agent_id AND decisions.seq = decision_ids.seq
               AND decisions.decided_at = triggers.ended_at
         WHERE triggers.agent_id = %(agent_id)s AND triggers.trigger_id = %(trigger_id)s""",
    # What a command was answered that the decision seq settled; or, of an ask that this one only accepted (its site had
    # the last word), the decision that then said what became of it.
    "first_answer": """
        SELECT decisions.record::text
          FROM decision_ids
          JOIN decisions ON decisions.agent_id = decision_ids.agent_id AND decisions.seq = decision_ids.seq
         WHERE decision_ids.agent_id = %(agent_id)s AND decision_ids.id = %(id)s AND decision_ids.seq >= %(seq)s
           AND %(id)s = ANY (decisions.settles)
           AND (decisions.seq = %(seq)s
                OR EXISTS (SELECT FROM jsonb_array_elements(decisions.record -> 'events') AS event
                            WHERE event ->> 'trigger_id' = %(id)s AND event ->> 'type' = ANY (%(outcomes)s)))
         ORDER BY decisions.seq
         LIMIT 1""",
}

QUERIES: Final = _OF_PROJECTIONS | _OURS


class ProjectionBehind(Exception):  # noqa: N818 - it reads as what it is
    """The projection hasn't reached the position that the read asks for."""


class Reading:
    """Queries on one state of the database. ``query_seconds``: None, where the whole reading is bounded."""

    def __init__(self, connection: AsyncConnection[DictRow], query_seconds: float | None = None) -> None:
        self._connection = connection
        self._query_seconds = query_seconds

    async def rows(self, name: str, **parameters: object) -> list[DictRow]:
        with self._bounded():
            return await (await self._connection.execute(QUERIES[name], parameters)).fetchall()

    async def together(self, **queries: Mapping[str, object]) -> dict[str, list[DictRow]]:
        """The rows of several queries, sent without waiting for one another; parameters by the query's name."""
        with self._bounded():
            async with self._connection.pipeline():
                cursors = {
                    name: await self._connection.execute(QUERIES[name], parameters)
                    for name, parameters in queries.items()
                }
            return {name: await cursor.fetchall() for name, cursor in cursors.items()}

    async def row(self, name: str, **parameters: object) -> DictRow | None:
        found = await self.rows(name, **parameters)
        return found[0] if found else None

    async def answered(self, questions: Questions[Result]) -> Result:
        """What these questions lead to. What they make of the rows may take a while, so it is done in a thread."""
        rows: Rows | None = None
        while not isinstance(step := await asyncio.to_thread(advance, questions, rows), Concluded):
            with self._bounded():
                cursor = await self._connection.cursor(row_factory=tuple_row).execute(*step)
                rows = await cursor.fetchall()
        return step.result

    async def value(self, name: str, **parameters: object) -> Any:
        """The first column of the first row, None if there is none."""
        row = await self.row(name, **parameters)
        return None if row is None else next(iter(row.values()))

    def _bounded(self) -> AbstractContextManager[None]:
        return (
            nullcontext() if self._query_seconds is None else _answering_within(self._connection, self._query_seconds)
        )


class Shared(Generic[Result]):
    """Work that many ask for at the same time and that is done for all of them.

    Whoever asks gets the result of work that began after they asked, so nothing is older than a query of their own
    would be. However many ask, one is under way and one waits to begin.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> None:
        self._work = work
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[Result] | None = None

    async def result(self) -> Result:
        if self._next is None:
            self._next = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> Result:
        async with self._one_at_a_time:
            self._next = None
            return await self._work()


class Database:
    """The database as the API uses it. ``run`` keeps the positions; reads may be asked for at any time."""

    def __init__(self, url: str) -> None:
        self.next_offsets: dict[int, int] = {}
        """Next offset of berth.decisions that the projection will apply, by partition."""
        self.site_next_offsets: dict[int, int] = {}
        """The same of berth.site-decisions."""
        self.answered_at_seconds: float | None = None
        """The event loop's time of the last answer."""
        self.error: str | None = None
        """Why it doesn't answer, None while it does."""
        self._url = url
        self._moved = asyncio.Condition()
        self._few = asyncio.Semaphore(POOL_CONNECTIONS_MAX // 2)
        """However many ask again at once, others find a connection."""
        self._looking_back = asyncio.Semaphore(POOL_CONNECTIONS_MAX // 2)
        self._slots: Shared[str] = Shared(lambda: self._read_slots(None))
        self._pool: AsyncConnectionPool[AsyncConnection[DictRow]] = AsyncConnectionPool(
            url,
            min_size=1,
            max_size=POOL_CONNECTIONS_MAX,
            open=False,
            timeout=POOL_WAIT_SECONDS,
            max_waiting=10 * POOL_CONNECTIONS_MAX,
            reconnect_timeout=RECONNECT_SECONDS,
            kwargs={**_OPTIONS, "row_factory": dict_row},
            configure=_configure,
        )

    @asynccontextmanager
    async def reading(self, min_position: LogPosition | None = None) -> AsyncIterator[Reading]:
        """One state of the database, not before ``min_position``.

        Raises ProjectionBehind, or psycopg.OperationalError or PoolTimeout when the database is away.
        """
        async with self._connected(min_position) as connection:
            with _answering_within(connection, READ_SECONDS_MAX):
                try:
                    yield Reading(connection)
                finally:
                    if not connection.closed:
                        await connection.rollback()

    @asynccontextmanager
    async def looking_back(self, min_position: LogPosition | None = None) -> AsyncIterator[Reading]:
        """As ``reading``, for what thinks between its queries. However many do, others find a connection."""
        try:
            async with asyncio.timeout(LOOK_BACK_WAIT_SECONDS):
                await self._looking_back.acquire()
        except TimeoutError:
            raise PoolTimeout(f"others looked back for {LOOK_BACK_WAIT_SECONDS} s") from None
        try:
            async with self._connected(min_position) as connection:
                try:
                    yield Reading(connection, READ_SECONDS_MAX)
                finally:
                    if not connection.closed:
                        with _answering_within(connection, READ_SECONDS_MAX):
                            await connection.rollback()
        finally:
            self._looking_back.release()

    @asynccontextmanager
    async def _connected(self, min_position: LogPosition | None) -> AsyncIterator[AsyncConnection[DictRow]]:
        if min_position is not None:
            await self.wait_for(min_position)
        if self.error is not None:
            raise psycopg.OperationalError(self.error)
        connection = await self._pool.getconn()
        try:
            yield connection
        finally:
            await self._pool.putconn(connection)

    async def wait_for(self, position: LogPosition) -> None:
        """Return when the projection has reached ``position``. Raises ProjectionBehind after 2 s."""
        try:
            async with asyncio.timeout(MIN_POSITION_SECONDS_MAX), self._moved:
                await self._moved.wait_for(lambda: position.is_reached_by(self.next_offsets, self.site_next_offsets))
        except TimeoutError:
            if self.error is not None:
                raise psycopg.OperationalError(self.error) from None
            raise ProjectionBehind from None

    async def moved(self, seconds: float) -> None:
        """Return when the projection has applied something more, at the latest after ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._moved:
                await self._moved.wait()

    async def slots(self, visible: list[str] | None = None, min_position: LogPosition | None = None) -> str:
        """``{agent: {"max", "active"}}`` of these agents, None: of all, as JSON. Raises as ``reading``."""
        if min_position is not None:
            await self.wait_for(min_position)
        return await (self._slots.result() if visible is None else self._read_slots(visible))

    async def _read_slots(self, visible: list[str] | None) -> str:
        async with self.reading() as reading:
            text: str = await reading.value("slots_as_json", after_agent_id="", visible=visible, max_rows=None)
            return text

    async def first_answer(self, command: Outgoing, seq: int, position: LogPosition) -> AnyDecision | None:
        """The decision that answered a command whose id ``seq`` settled or accepted; both are before ``position``.

        None when the projection is behind or the database away.
        """
        about = {"id": command.id, "seq": seq, "outcomes": list(OUTCOME_TYPES)}
        of_site = command.kind == "site_control"
        try:
            await self.wait_for(position)
            async with self._few, self.reading() as reading:
                if of_site:
                    record = await reading.value("site_decision_as_text", site=command.decider, seq=seq)
                else:
                    record = await reading.value("first_answer", agent_id=command.decider, **about)
        except (psycopg.OperationalError, psycopg.errors.UndefinedTable, PoolTimeout, ProjectionBehind) as error:
            log.warning("database_not_reached", error=repr(error))
            return None
        if record is None:
            return None
        return read_site_decision(record.encode()) if of_site else read_decision(record.encode())

    async def run(self) -> None:
        """Keep ``next_offsets`` until cancelled."""
        await self._pool.open()
        try:
            while True:
                try:
                    async with await AsyncConnection.connect(
                        self._url, autocommit=True, row_factory=dict_row, **_OPTIONS
                    ) as connection:
                        await self._follow(connection)
                except (psycopg.Error, TimeoutError, OSError) as error:
                    if self.error is None:
                        log.warning("database_not_reached", error=repr(error))
                    self.error = str(error).strip() or repr(error)
                await asyncio.sleep(RECONNECT_SECONDS)
        finally:
            await self._pool.close(timeout=1)

    async def _follow(self, connection: AsyncConnection[DictRow]) -> None:
        await connection.execute(f"LISTEN {CHANNEL}")
        while True:
            with _answering_within(connection, READ_SECONDS_MAX):
                rows = await (await connection.execute(QUERIES["positions"])).fetchall()
            if self.error is not None:
                await self._pool.drain()  # its connections are of a server that is gone
                log.info("database_reached")
                self.error = None
            async with self._moved:
                self.next_offsets = _offsets_of(DECISIONS, rows)
                self.site_next_offsets = _offsets_of(SITE_DECISIONS, rows)
                self.answered_at_seconds = asyncio.get_running_loop().time()
                self._moved.notify_all()
            async for _ in connection.notifies(timeout=REFRESH_SECONDS, stop_after=1):
                pass


def _offsets_of(topic: Topic, rows: Sequence[DictRow]) -> dict[int, int]:
    return {row["partition"]: row["next_offset"] for row in rows if row["topic"] == topic.name}


@contextmanager
def _answering_within(connection: AsyncConnection[DictRow], seconds: float) -> Iterator[None]:
    """Cut the connection when the block takes longer: what waits in it then raises OperationalError.

    Cancelling wouldn't do: psycopg then waits for the server to confirm it, which one that is frozen never does.
    """

    def cut() -> None:
        with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as stream:
            stream.shutdown(socket.SHUT_RDWR)

    timer = asyncio.get_running_loop().call_later(seconds, cut)
    try:
        yield
    finally:
        timer.cancel()


async def _configure(connection: AsyncConnection[DictRow]) -> None:
    await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
    await connection.set_read_only(True)
