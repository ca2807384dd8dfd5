"""Bytes and messages: what a record says, whom it is for, and what becomes of one that can't be read (G2).

Every record has one of four fates: a command for an agent; an *invalid* command, when it can't be read but names
an agent and an id, so that whoever waits hears of it; a copy on the right partition, when it lay on the wrong one or
had no key (once: its origin stays in a header); or a dead letter with the reason.

Rows: the key is a JSON array, such as ``["trigger", agent, trigger]``, so that no joined string makes two different
pairs equal. Values leave out what has its default. A row that couldn't be read back is refused when it is written.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeGuard, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from streams import CLAIMS, CONTROLS, SIGNALS, SITE_CONTROLS, STATUSES, TEXTS, TRIGGERS
from streams.rules import events, limits
from streams.rules.agent.rows import AgentRow, ConversationRow, RememberedRow, TriggerRow, WatchRow
from streams.rules.agent.step import Via
from streams.rules.commands import AgentCommand, AgentInput
from streams.rules.messages import (
    TEXT_FIELDS,
    Approve,
    Archive,
    Configure,
    ControlRecord,
    Invalid,
    Pause,
    Reschedule,
    Resume,
    ResumeTrigger,
    Status,
    Stop,
    Text,
    Trigger,
    TriggerRecord,
    stamp_content,
)
from streams.rules.site_events import SiteCommand, SiteInput
from streams.rules.site_messages import (
    Claim,
    ClaimRecord,
    ConfigureSite,
    Degraded,
    DeleteEnvironment,
    DeleteFolder,
    Denied,
    Gate,
    Granted,
    InvalidSite,
    PauseSite,
    Recall,
    Release,
    Resolved,
    ResumeSite,
    SignalRecord,
    SiteControlRecord,
    Unwatch,
    Waiting,
    Watch,
)

DeciderMessage = Claim | Release | Granted | Waiting | Denied | Recall | Degraded | Watch | Unwatch | Resolved
Headers = tuple[tuple[str, bytes], ...]


class Record(NamedTuple):
    """One record of an input topic, as it came from Kafka."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]] = ()
    timestamp_ms: int = 0
    """When it was written, by the clock of who wrote it (the broker's, where topics say so); for measuring only."""


class Output(NamedTuple):
    """One record to be written. ``partition`` None: the same number as the writer's own."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None


class Command(NamedTuple):
    """A record that an agent's decider handles."""

    agent_id: str
    command: AgentCommand
    via: Via


class Rekeyed(NamedTuple):
    """A record that belongs on another partition."""

    output: Output


class DeadLetter(NamedTuple):
    """A record that nobody can be answered for."""

    reason: str


class SiteCommandRead(NamedTuple):
    """A record that a site's decider handles."""

    site_id: str
    command: SiteCommand
    via: Via


Fate = Command | SiteCommandRead | Rekeyed | DeadLetter

_READERS: Final[dict[str, TypeAdapter[Any]]] = {
    TRIGGERS.name: TypeAdapter(TriggerRecord),
    STATUSES.name: TypeAdapter(Status),
    CONTROLS.name: TypeAdapter(ControlRecord),
    SITE_CONTROLS.name: TypeAdapter(SiteControlRecord),
    CLAIMS.name: TypeAdapter(ClaimRecord),
    SIGNALS.name: TypeAdapter(SignalRecord),
}
_OF_SITES: Final = frozenset({SITE_CONTROLS.name, CLAIMS.name})
_INTERNAL: Final = frozenset({CLAIMS.name, SIGNALS.name})
_WITHOUT_WAITER: Final = frozenset({STATUSES.name, CLAIMS.name, SIGNALS.name})
_KNOWN_FIELDS: Final = {
    topic: sorted({name for model in models for name in model.model_fields})
    for topic, models in (
        (TRIGGERS.name, (Trigger, Stop)),
        (STATUSES.name, (Status,)),
        (CONTROLS.name, (Configure, Pause, Resume, Archive, Approve, Reschedule, ResumeTrigger)),
        (SITE_CONTROLS.name, (ConfigureSite, PauseSite, ResumeSite, Gate, DeleteFolder, DeleteEnvironment)),
    )
}
_DISPATCH_BYTES_MAX: Final = 16 * 1024
"""More than a dispatch has beside its message and payload."""
_ID: Final = re.compile(rf"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{{1,{limits.ID_CHARACTERS_MAX}}}")
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
ORIGIN_HEADER: Final = "origin"
VIA_HEADER: Final = "via"


def read(record: Record, partitions: int) -> Fate:
    """What is to be done with an input record; ``partitions`` is the number of partitions of every topic."""
    if record.value is None:
        return DeadLetter("null_value")
    size = _size(record)
    if size > limits.RECORD_BYTES_MAX:
        return _read_oversized(record, record.value, size, partitions)
    try:
        command = _READERS[record.topic].validator.validate_json(record.value)
    except ValidationError as error:
        return _read_bad(record, record.value, error, partitions)
    if isinstance(command, Trigger) and (reason := _outgrows(command)) is not None:
        return _invalid(record, record.value, command.agent_id, command.id, reason, partitions)
    decider = command.site if record.topic in _OF_SITES else command.agent_id
    return _routed(record, decider, command, partitions)


def _decider_of(command: AgentInput | SiteInput) -> str:
    """The agent or site that decides it, after which its topic is partitioned."""
    return command.site if isinstance(command, SiteInput) else command.agent_id


def _size(record: Record) -> int:
    size = len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        size += len(name.encode()) + len(value or b"")
    return size


def _outgrows(command: Trigger) -> str | None:
    """Texts may be longer as JSON than they are; those that no dispatch could hold are refused."""
    size = sum(len(text.json) for text in (command.message, command.payload) if text is not None and text.json)
    if size <= limits.RECORD_BYTES_MAX - _DISPATCH_BYTES_MAX:
        return None
    return f"invalid_field: payload: message and payload have {size} bytes as JSON: more than a dispatch can hold"


def _read_oversized(record: Record, value: bytes, size: int, partitions: int) -> Fate:
    reason = f"oversized: {size} bytes, {limits.RECORD_BYTES_MAX} are allowed"
    content, _ = _parse(value)
    decider, id = _names(record.topic, content)
    if decider is None or id is None:
        return DeadLetter(reason)
    fate = _invalid(record, value, decider, id, reason, partitions)
    return fate if not isinstance(fate, Rekeyed) else DeadLetter(reason)  # it is too large to be copied elsewhere


def _routed(record: Record, decider: str, command: AgentInput | Invalid | SiteInput, partitions: int) -> Fate:
    """``decider``: the agent or site."""
    partition = partition_of(decider, partitions)
    if record.key is None or record.partition != partition:
        return _rekeyed(record, decider, partition)
    if isinstance(command, Trigger):
        stamp_content(command)
    via: Via = "kafka"
    if record.topic in _INTERNAL:
        via = "internal"
    elif record.headers and any(name == VIA_HEADER and value == b"http" for name, value in record.headers):
        via = "http"
    if record.topic in _OF_SITES:
        return SiteCommandRead(decider, cast("SiteCommand", command), via)
    return Command(decider, cast("AgentCommand", command), via)


def _rekeyed(record: Record, decider: str, partition: int) -> Fate:
    if any(name == ORIGIN_HEADER for name, _ in record.headers):
        return DeadLetter("wrong_partition_twice")
    origin = to_json({"topic": record.topic, "partition": record.partition, "offset": record.offset})
    headers = (*record.headers, (ORIGIN_HEADER, origin))
    return Rekeyed(Output(record.topic, decider.encode(), record.value, headers, partition))


def _read_bad(record: Record, value: bytes, error: ValidationError, partitions: int) -> Fate:
    """A record that its model doesn't take: find out why, and whether somebody can be told."""
    content, reason = _parse(value)
    if content is None:
        return DeadLetter(reason)
    if error.errors(include_url=False, include_input=False)[0]["type"] == "json_invalid":
        command = _read_odd_texts(record.topic, content)
        if isinstance(command, str):
            reason = command
        elif isinstance(command, Trigger) and (too_large := _outgrows(command)) is not None:
            reason = too_large
        else:
            return _routed(record, _decider_of(command), command, partitions)
    else:
        reason = _reason(error)
    decider, id = _names(record.topic, content)
    if decider is None or id is None:
        return DeadLetter(reason)
    return _invalid(record, value, decider, id, reason, partitions)


def _names(topic: str, content: dict[str, Any] | None) -> tuple[str | None, str | None]:
    """Who was to decide it, and the id that somebody waits for; None where they can't be read."""
    if content is None or topic in _WITHOUT_WAITER:
        return None, None
    decider, id = content.get("site" if topic in _OF_SITES else "agent_id"), content.get("id")
    return decider if _is_id(decider) else None, id if _is_id(id) else None


def _invalid(record: Record, value: bytes, decider: str, id: str, reason: str, partitions: int) -> Fate:
    sha256 = hashlib.sha256(value).hexdigest()
    size = len(value)
    if record.topic in _OF_SITES:
        invalid_site = InvalidSite(site=decider, id=id, reason=reason, sha256=sha256, bytes=size)
        return _routed(record, decider, invalid_site, partitions)
    invalid = Invalid(agent_id=decider, id=id, reason=reason, sha256=sha256, bytes=size)
    return _routed(record, decider, invalid, partitions)


def _parse(value: bytes) -> tuple[dict[str, Any] | None, str]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        content = json.loads(value.decode(), parse_constant=refuse)
    except UnicodeDecodeError:
        return None, "not_utf8"
    except RecursionError:
        return None, "not_json: nested too deeply"
    except ValueError as error:
        return None, f"not_json: {error}"[:300]
    return (content, "") if isinstance(content, dict) else (None, "not_an_object")


def _read_odd_texts(topic: str, content: dict[str, Any]) -> AgentInput | SiteInput | str:
    """A record that the fast reader takes for no JSON: texts may hold lone surrogates (G3), nothing else may."""
    if topic not in _KNOWN_FIELDS:
        return "not_json"
    texts = {name: content[name] for name in TEXT_FIELDS if content.get(name) is not None}
    rest = {name: content[name] for name in _KNOWN_FIELDS[topic] if name in content and name not in texts}
    for name, field in rest.items():
        if _SURROGATES.search(json.dumps(field, ensure_ascii=False)):
            return f"invalid_field: {name}: holds a lone surrogate"
    try:
        command = _READERS[topic].validate_json(json.dumps(rest, allow_nan=False))
        known = {name: Text.of(text) for name, text in texts.items() if name in type(command).model_fields}
    except ValidationError as error:
        return _reason(error)
    except (ValueError, RecursionError) as error:
        return f"not_json: {error}"[:300]
    for name, bytes_max in (("message", limits.MESSAGE_BYTES_MAX), ("payload", limits.PAYLOAD_BYTES_MAX)):
        if name in known and known[name].bytes > bytes_max:
            return f"invalid_field: {name}: has {known[name].bytes} bytes, {bytes_max} are allowed"
    if "message" in known and not isinstance(texts["message"], str):
        return "invalid_field: message: must be a string"
    copied: AgentInput | SiteInput = command.model_copy(update=known)
    return copied


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    kind, place = first["type"], ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
    if kind in ("union_tag_invalid", "literal_error") and place in ("", "type"):
        return "unknown_type"
    if kind == "union_tag_not_found":
        return "missing_field: type"
    field = ".".join(str(part) for part in first["loc"]).removeprefix(f"{_tag(first['loc'])}.")
    if field == "v" or field.endswith(".v"):
        return f"future_schema: v: {first['msg']}"
    if kind == "missing":
        return f"missing_field: {field}"
    return f"invalid_field: {field}: {first['msg']}"[:500]


def _tag(location: tuple[int | str, ...]) -> str:
    return str(location[0]) if location else ""


def _is_id(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


# Rows

Key = tuple[str, ...]
PARTITION_KEY: Final[Key] = ("partition",)

_KEY: Final = TypeAdapter(Key)
_AGENT: Final = TypeAdapter(AgentRow)
_TRIGGER: Final = TypeAdapter(TriggerRow)
_CONVERSATION: Final = TypeAdapter(ConversationRow)
_REMEMBERED: Final = TypeAdapter(RememberedRow)
_WATCH: Final = TypeAdapter(WatchRow)


class PartitionRow(NamedTuple):
    """What a partition knows beside its agents."""

    at: int
    """The latest instant of a decision; the next one is not before it."""
    positions: dict[str, int]
    """Next offset of every input topic."""
    heartbeats: int
    """Signs of life handled: the input that leaves no decision."""


_PARTITION: Final = TypeAdapter(PartitionRow)


class UnreadableRow(Exception):  # noqa: N818 - it reads as what it is
    """A stored row that can't be read: damaged, not written by Berth, or by a version that knows more."""

    def __init__(self, key: bytes, error: Exception) -> None:
        why = first_problem(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        name = key.decode(errors="backslashreplace")
        super().__init__(f"{name[:200]}{'…' if len(name) > 200 else ''} ({why[:200]})")


def first_problem(error: ValidationError) -> str:
    """What is wrong first with a row, after where in it."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join([*map(str, first["loc"]), first["msg"]])


def write_key(key: Key) -> bytes:
    return to_json(key)


def read_key(key: bytes) -> Key:
    return _KEY.validate_json(key)


def write_agent(row: AgentRow) -> bytes:
    return _AGENT.serializer.to_json(row, exclude_defaults=True, warnings="error")


def read_agent(value: bytes) -> AgentRow:
    return _AGENT.validate_json(value)


def write_trigger(row: TriggerRow) -> bytes:
    return _TRIGGER.serializer.to_json(row, exclude_defaults=True, warnings="error")


def read_trigger(value: bytes) -> TriggerRow:
    return _TRIGGER.validate_json(value)


def write_conversation(row: ConversationRow) -> bytes:
    return _CONVERSATION.serializer.to_json(row, warnings="error")


def read_conversation(value: bytes) -> ConversationRow:
    return _CONVERSATION.validate_json(value)


def write_remembered(row: RememberedRow) -> bytes:
    return _REMEMBERED.serializer.to_json(row, warnings="error")


def read_remembered(value: bytes) -> RememberedRow:
    return _REMEMBERED.validate_json(value)


def write_watch(row: WatchRow) -> bytes:
    return _WATCH.serializer.to_json(row, warnings="error")


def read_watch(value: bytes) -> WatchRow:
    return _WATCH.validate_json(value)


def write_partition(row: PartitionRow) -> bytes:
    return to_json(row._asdict())


def read_partition(value: bytes) -> PartitionRow:
    content = from_json(value)
    return _PARTITION.validate_python((content["at"], content["positions"], content["heartbeats"]))


def write_texts(message: Text | None, payload: Text | None) -> bytes | None:
    """The row of a trigger's texts, as JSON of their own order and spelling; None if it has none."""
    parts = [
        b'"%s":%s' % (name.encode(), text.json)
        for name, text in (("message", message), ("payload", payload))
        if text is not None and text.json is not None
    ]
    return b"{%s}" % b",".join(parts) if parts else None


def checked_texts(value: bytes) -> bytes:
    """A texts' row as ``with_texts`` needs it. ValueError if it isn't whole; its texts may be spelled in any way."""
    if value[:1] != b"{" or value[-1:] != b"}":
        raise ValueError("no JSON object")
    return value


def with_texts(dispatch: bytes, texts: bytes | None) -> bytes:
    """The dispatch's JSON object with the fields of the texts' row."""
    return dispatch if texts is None else dispatch[:-1] + b"," + texts[1:]


def write_message(message: DeciderMessage, partitions: int) -> Output:
    """What one decider tells another, on the partition of the one that it tells."""
    value = message.__pydantic_serializer__.to_json(message, exclude_unset=True)
    topic = CLAIMS if isinstance(message, Claim | Release) else SIGNALS
    decider = message.site if isinstance(message, Claim | Release) else message.agent_id
    return Output(topic.name, decider.encode(), value, (), partition_of(decider, partitions))


def decision_headers(command_id: str | None, settles: tuple[str, ...]) -> Headers:
    """What a waiter looks for, so that it need not decode the decision."""
    named = () if command_id is None else (("command_id", command_id.encode()),)
    return (*named, *(("settles", id.encode()) for id in settles))


# Partitioner


@lru_cache(maxsize=65536)
def partition_of(key: str, partitions: int) -> int:
    """The partition of a key, as Kafka's Java clients choose it: murmur2 of the UTF-8, modulo."""
    return (_murmur2(key.encode()) & 0x7FFFFFFF) % partitions


def _murmur2(data: bytes) -> int:
    """32-bit MurmurHash2 with Kafka's seed (org.apache.kafka.common.utils.Utils.murmur2)."""
    multiplier, mask = 0x5BD1E995, 0xFFFFFFFF
    length = len(data)
    result = (0x9747B28C ^ length) & mask
    whole = length - length % 4
    for start in range(0, whole, 4):
        word = int.from_bytes(data[start : start + 4], "little") * multiplier & mask
        word = (word ^ word >> 24) * multiplier & mask
        result = result * multiplier & mask ^ word
    if whole < length:
        result = (result ^ int.from_bytes(data[whole:], "little")) * multiplier & mask
    result = (result ^ result >> 13) * multiplier & mask
    return result ^ result >> 15


def text_output(
    key: bytes,
    agent_id: str,
    trigger_id: str,
    execution_id: str | None,
    kind: Literal["message", "error", "result"],
    text: Text,
) -> Output:
    """A text of a person, for projections; a long outcome is cut."""
    assert text.json is not None
    value, truncated = text.json, False
    if kind != "message" and text.bytes > limits.OUTCOME_BYTES_MAX:
        value, truncated = text.cut(limits.OUTCOME_BYTES_MAX), True
    record = events.TextRecord(
        agent_id=agent_id, trigger_id=trigger_id, execution_id=execution_id, kind=kind, truncated=truncated
    )
    head = record.__pydantic_serializer__.to_json(record, exclude_unset=True)
    return Output(TEXTS.name, key, head[:-1] + b',"text":' + value + b"}")
