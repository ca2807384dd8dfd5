"""The files of recorded logs: JSON lines in which every value stands exactly as it was written to Kafka."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from streams.codec import Record
from streams.rules.order import format_instant, parse_instant
from tests.driving import Action, Driven, Json

DIRECTORY: Final = Path(__file__).parent
POOL_UNSAID: Final = 4
"""The capacity of new sites where a recording says none."""


def commands_file(name: str) -> Path:
    return DIRECTORY / f"{name}.commands.jsonl"


def written_file(name: str) -> Path:
    return DIRECTORY / f"{name}.written.jsonl"


def slice_file(name: str) -> Path:
    """One agent's decisions, as berth audit export writes them."""
    return DIRECTORY / f"{name}.slice.jsonl"


def commands_of(driven: Driven) -> bytes:
    """First the partition's settings, then one line for each thing that was done."""
    head = {
        "default_limit": driven.default_limit,
        "partitions": driven.partitions,
        "number": driven.number,
        **({} if driven.pool == POOL_UNSAID else {"pool": driven.pool}),
        "now": format_instant(driven.started_at),
    }
    return b"".join(
        json.dumps(line, ensure_ascii=True).encode() + b"\n" for line in [head, *map(_line, driven.journal)]
    )


def _line(action: Action) -> Json:
    line: Json = {"now": format_instant(action.now), "do": action.what}
    record = action.record
    if record is not None:
        line |= {"topic": record.topic, "partition": record.partition, "offset": record.offset}
        line["key"] = None if record.key is None else record.key.decode()
        line["headers"] = [[name, value.decode()] for name, value in record.headers]
        line |= _value(record.value)
    return line


def _value(value: bytes | None) -> Json:
    if value is None:
        return {"value": None}
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict) and json.dumps(parsed).encode() == value:
        return {"value": parsed}
    return {"base64": base64.b64encode(value).decode()}


def replayed(name: str) -> Driven:
    """Do everything in the file of commands again."""
    head, *lines = [json.loads(line) for line in commands_file(name).read_bytes().splitlines()]
    driven = Driven(
        head["default_limit"], head["partitions"], head["number"], delivers=False, pool=head.get("pool", POOL_UNSAID)
    )
    driven.now = parse_instant(head["now"])
    for line in lines:
        driven.now = parse_instant(line["now"])
        if line["do"] == "record":
            driven.redo(_record(line))
        elif line["do"] == "fire":
            driven.fire()
        else:
            driven.crash()
    return driven


def _record(line: Json) -> Record:
    value = base64.b64decode(line["base64"]) if "base64" in line else line["value"]
    if value is not None and not isinstance(value, bytes):
        value = json.dumps(value).encode()
    key = None if line["key"] is None else line["key"].encode()
    headers = tuple((name, text.encode()) for name, text in line["headers"])
    return Record(line["topic"], line["partition"], line["offset"], key, value, headers)


def written_by(driven: Driven) -> bytes:
    """Every output in order, then the rows that are left, by key."""
    return b"".join(line + b"\n" for line in (*_outputs(driven), *_rows(driven)))


def _outputs(driven: Driven) -> Iterator[bytes]:
    for output in driven.outputs:
        about: Json = {"topic": output.topic, "key": None if output.key is None else output.key.decode()}
        if output.partition is not None:
            about["partition"] = output.partition
        if output.headers:
            about["headers"] = [[name, value.decode()] for name, value in output.headers]
        yield _with_value(about, output.value)


def _rows(driven: Driven) -> Iterator[bytes]:
    for key, value in sorted(driven.rows.items()):
        yield _with_value({"row": json.loads(key)}, value)


def _with_value(about: Json, value: bytes | None) -> bytes:
    try:
        is_json = value is not None and json.loads(value) is not None and b"\n" not in value
    except ValueError:
        is_json = False
    if value is None or not is_json:
        return json.dumps(about | ({"value": None} if value is None else _value(value))).encode()
    return json.dumps(about).encode()[:-1] + b', "value": ' + value + b"}"
