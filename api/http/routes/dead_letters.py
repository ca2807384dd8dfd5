"""Dead letters: records that nobody could be answered for. See them, and send one once more to where it came from.

A dead letter holds a record as it came, so only an admin who may see every agent sees any. Replaying one is for when
its cause is gone: workers that know its schema, a bug mended after ``berth skip``. It goes to the topic and partition
on which it was, with its key and value and a header that says which dead letter it was and who asked. Nothing keeps
anybody from replaying one twice; then the ids in it tell, as with every repetition (F3, F8). What still can't be read
becomes a new dead letter.

Only records of topics that the API may write go that way. Those of claims and signals are words between an agent and a
site, which are of no use to them later and out of their order.
"""

import base64
import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

import structlog
from fastapi import APIRouter, Path
from fastapi.responses import JSONResponse
from psycopg.rows import DictRow

from api.http import views
from api.http.decisions import Parcel
from api.http.problems import Problem, invalid
from api.http.routes.parameters import PAGE_ROWS_DEFAULT, ArrivalOf, Cursor, Rows, Service, ServiceOf, answer
from streams import INPUT_TOPICS, Topic
from streams.rules.limits import RECORD_BYTES_MAX

router = APIRouter(prefix="/api/dead-letters", tags=["operation"])

REPLAYABLE_TOPICS: Final[Mapping[str, Topic]] = {topic.name: topic for topic in INPUT_TOPICS if "api" in topic.writers}
REPLAYS_HEADER: Final = "replays"
HEADER_BYTES_MAX: Final = 2048
"""More than the header of a replay has."""
_PARTITION_MAX: Final = 2**31 - 1
_OFFSET_MAX: Final = 2**63 - 1

Partition = Annotated[int, Path(ge=0, le=_PARTITION_MAX, description="partition of berth.dead-letters")]
Offset = Annotated[int, Path(ge=0, le=_OFFSET_MAX, description="offset in it")]

log = structlog.get_logger()


@router.get("")
async def list_dead_letters(service: ServiceOf, rows: Rows = PAGE_ROWS_DEFAULT, cursor: Cursor = None) -> JSONResponse:
    """Dead letters, the newest first, with the beginning of each."""
    page: dict[str, Any] = {
        "before_written_at": "infinity",
        "before_partition": _PARTITION_MAX,
        "before_offset": _OFFSET_MAX,
        "max_rows": rows,
    }
    if cursor is not None:
        written_at, partition, offset = views.read_cursor(cursor, 3)
        if not (partition.isdecimal() and offset.isdecimal() and len(partition) < 10 and len(offset) < 19):
            raise invalid("invalid_field", "cursor", "cursor must be a next_cursor that this service gave.")
        page |= {
            "before_written_at": views.read_instant_of_cursor(written_at),
            "before_partition": int(partition),
            "before_offset": int(offset),
        }
    async with service.database.reading() as reading:
        found = await reading.rows("dead_letters_begun_page", **page)
    following = None
    if len(found) == rows:
        last = found[-1]
        following = views.cursor(last["written_at"], str(last["log_partition"]), str(last["log_offset"]))
    listed = [
        _about(service, row) | {f"{name}_preview": _preview(row[name]) for name in ("key", "value")} for row in found
    ]
    return answer({"dead_letters": listed, "next_cursor": following})


@router.get("/{partition}/{offset}")
async def read_dead_letter(service: ServiceOf, partition: Partition, offset: Offset) -> JSONResponse:
    """One dead letter, whole."""
    row = await _find(service, partition, offset)
    return answer(
        {
            **_about(service, row),
            "not_replayable_because": _hindrance(service, row),
            **_content("key", row["key"]),
            **_content("value", row["value"]),
        }
    )


@router.post("/{partition}/{offset}/replay", status_code=202)
async def replay_dead_letter(
    service: ServiceOf, partition: Partition, offset: Offset, arrival: ArrivalOf
) -> JSONResponse:
    """Send it once more to where it came from. 202: Kafka has it, and a worker will handle it."""
    row = await _find(service, partition, offset)
    hindrance = _hindrance(service, row)
    if hindrance is not None:
        raise Problem(409, "dead_letter_not_replayable", f"It can't be replayed: {hindrance}. Nothing was sent.")
    topic = REPLAYABLE_TOPICS[row["source_topic"]]
    by = arrival.caller.subject
    origin = json.dumps({"partition": partition, "offset": offset, "requested_by": by}, ensure_ascii=False).encode()
    parcel = Parcel(row["source_partition"], row["key"], row["value"], [(REPLAYS_HEADER, origin)])
    await service.log.post(topic, [parcel], arrival.seconds)
    told = {"reason": row["reason"], "topic": topic.name, "source_partition": row["source_partition"]}
    log.info("dead_letter_replayed", partition=partition, offset=offset, subject=by, **told)
    return JSONResponse({"status": "accepted", "partition": partition, "offset": offset, **told}, status_code=202)


async def _find(service: Service, partition: int, offset: int) -> DictRow:
    async with service.database.reading() as reading:
        row = await reading.row("dead_letter", partition=partition, offset=offset)
    if row is None:
        raise Problem(
            404,
            "dead_letter_unknown",
            f"There is no dead letter at offset {offset} of partition {partition}, or it is older than texts are kept.",
        )
    return row


def _about(service: Service, row: DictRow) -> dict[str, Any]:
    return {
        "partition": row["log_partition"],
        "offset": row["log_offset"],
        "written_at": views.instant(row["written_at"]),
        "reason": row["reason"],
        "topic": row["source_topic"],
        "source_partition": row["source_partition"],
        "source_offset": row["source_offset"],
        "value_bytes": row["value_bytes"],
        "replayable": _hindrance(service, row) is None,
    }


def _hindrance(service: Service, row: DictRow) -> str | None:
    """Why a dead letter can't be replayed; None: it can."""
    topic, partition = row["source_topic"], row["source_partition"]
    if topic not in REPLAYABLE_TOPICS:
        return f"it was on {topic}, into which only workers write" if topic else "nobody knows on which topic it was"
    if partition is None or partition >= service.log.partitions:
        return "nobody knows on which partition it was"
    if row["value_bytes"] is None:
        return "it has no value"
    if row["value_bytes"] + (row["key_bytes"] or 0) > RECORD_BYTES_MAX - HEADER_BYTES_MAX:
        return f"it is larger than the {RECORD_BYTES_MAX:,} bytes that a record may have"
    return None


def _preview(content: bytes | None) -> str | None:
    return None if content is None else content.decode(errors="replace")


def _content(name: str, content: bytes | None) -> dict[str, str | None]:
    """Bytes as text, or in base64 where they are no text; both null when there are none."""
    try:
        text = None if content is None else content.decode()
    except UnicodeDecodeError:
        assert content is not None
        return {name: None, f"{name}_base64": base64.b64encode(content).decode()}
    return {name: text, f"{name}_base64": None}
