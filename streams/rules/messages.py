"""Everything that comes in over a wire: commands, statuses, controls, and what agents and sites tell each other.

The models are the contract of docs/events.md. They read JSON as it stands on a topic and write it back for the log of
decisions. Three habits keep that exact:

- An absent field stays absent (``exclude_unset``): in ``configure`` absent and null mean different things.
- Instants are RFC 3339 on the wire and microseconds (int) in memory.
- Texts of people (message, payload, error, result) are read as :class:`Text` and written to the log as their digest.

Unknown fields are ignored. A number where a boolean belongs, or "3" where 3 belongs, is refused.
"""

import hashlib
import json
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    StrictBool,
    StrictInt,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from streams.rules import limits
from streams.rules.folders import FolderInvalid, segments
from streams.rules.order import format_instant, parse_instant

LOGGED: Final = {"logged": True}
"""Validation context for reading a command back from the log: texts are digests, the decider's inputs are read."""


def _is_logged(info: ValidationInfo) -> bool:
    return info.context is not None and bool(info.context.get("logged"))


def _instant_schema(_source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
    return core_schema.json_or_python_schema(
        json_schema=core_schema.no_info_after_validator_function(parse_instant, core_schema.str_schema()),
        python_schema=core_schema.int_schema(strict=True),
        serialization=core_schema.plain_serializer_function_ser_schema(format_instant, when_used="json-unless-none"),
    )


Instant = Annotated[int, GetPydanticSchema(_instant_schema)]
"""Microseconds since 1970 in UTC; RFC 3339 on the wire."""


_encode_text: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class Text:
    """A text or payload of people: its JSON for whoever runs it, its digest for the log that is kept for ever.

    ``sha256`` and ``bytes`` are those of the UTF-8 of a string, and of the compact JSON with sorted keys of anything
    else, so that the same content has one digest. ``json`` keeps the order of keys as it came.
    ``json`` is None when the text was read from a decision, which holds only the digest.
    """

    __slots__ = ("bytes", "json", "sha256")

    def __init__(self, json_text: bytes | None, sha256: str, size_bytes: int) -> None:
        self.json = json_text
        self.sha256 = sha256
        self.bytes = size_bytes

    @classmethod
    def of(cls, value: object) -> "Text":
        """ValueError if the value holds a number that JSON can't hold (NaN, or one too large for a double)."""
        try:
            written = _encode_text(value)
        except ValueError:
            raise ValueError("holds a number that JSON can't hold") from None
        try:
            encoded = written.encode()
        except UnicodeEncodeError:  # lone surrogates: legal as JSON escapes, not as UTF-8
            encoded = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        if isinstance(value, str):
            content = value.encode("utf-8", "surrogatepass")
        elif isinstance(value, dict | list):
            canonical = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
            content = canonical.encode("utf-8", "surrogatepass")
        else:
            content = encoded
        return cls(encoded, hashlib.sha256(content).hexdigest(), len(content))

    def cut(self, bytes_max: int) -> bytes:
        """The beginning of the text, or of the JSON of what is no text, as the JSON of a string."""
        assert self.json is not None
        value = json.loads(self.json)
        content = value.encode("utf-8", "replace") if isinstance(value, str) else self.json
        return json.dumps(content[:bytes_max].decode("utf-8", "ignore")).encode()

    def digest(self) -> dict[str, str | int]:
        return {"sha256": self.sha256, "bytes": self.bytes}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and (self.sha256, self.bytes) == (other.sha256, other.bytes)

    def __hash__(self) -> int:
        return hash((self.sha256, self.bytes))

    def __repr__(self) -> str:
        return f"Text({self.bytes} bytes, sha256 {self.sha256[:8]})"


def _bounded_text(bytes_max: int | None, only_string: bool) -> GetPydanticSchema:
    def read(value: object, info: ValidationInfo) -> Text:
        if _is_logged(info):
            if not isinstance(value, dict) or not isinstance(value.get("sha256"), str):
                raise PydanticCustomError("digest_type", "must be a digest {sha256, bytes}")
            return Text(None, value["sha256"], int(value.get("bytes", 0)))
        if only_string and not isinstance(value, str):
            raise PydanticCustomError("text_type", "must be a string")
        text = Text.of(value)
        if bytes_max is not None and text.bytes > bytes_max:
            raise PydanticCustomError(
                "too_long", "has {bytes} bytes, {max} are allowed", {"bytes": text.bytes, "max": bytes_max}
            )
        return text

    def schema(_source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.json_or_python_schema(
            json_schema=core_schema.nullable_schema(core_schema.with_info_plain_validator_function(read)),
            python_schema=core_schema.nullable_schema(core_schema.is_instance_schema(Text)),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda text: None if text is None else text.digest(), when_used="json"
            ),
        )

    return GetPydanticSchema(schema)


MessageText = Annotated[Text | None, _bounded_text(limits.MESSAGE_BYTES_MAX, only_string=True)]
Payload = Annotated[Text | None, _bounded_text(limits.PAYLOAD_BYTES_MAX, only_string=False)]
OutcomeText = Annotated[Text | None, _bounded_text(None, only_string=False)]
"""error and result: one too long is cut for the readers, not refused, since refusing the status would keep the slot."""

TEXT_FIELDS: Final = ("message", "payload", "error", "result")

NO_CONTROL_CHARACTERS: Final = r"^[^\x00-\x1f\x7f-\x9f]+$"
Id = Annotated[str, StringConstraints(min_length=1, max_length=limits.ID_CHARACTERS_MAX, pattern=NO_CONTROL_CHARACTERS)]


def _comparable(path: str, info: ValidationInfo) -> str:
    if not _is_logged(info):  # the log may hold what was refused
        try:
            segments(path)
        except FolderInvalid as invalid:
            raise PydanticCustomError("folder", "{why}", {"why": str(invalid)}) from None
    return path


FolderPath = Annotated[
    str,
    StringConstraints(min_length=1, max_length=limits.FOLDER_BYTES_MAX, pattern=NO_CONTROL_CHARACTERS),
    AfterValidator(_comparable),
]
"""A folder as it was sent, of which there is a compared form (D2)."""
Kind = Annotated[
    str, StringConstraints(min_length=1, max_length=limits.ID_CHARACTERS_MAX, pattern=NO_CONTROL_CHARACTERS)
]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
SchemaVersion = Annotated[StrictInt, Field(ge=1, le=limits.SCHEMA_VERSION)]
TimeoutSeconds = Annotated[StrictInt, Field(ge=1, le=limits.TIMEOUT_SECONDS_MAX)]
HeartbeatSeconds = Annotated[StrictInt, Field(ge=1, le=limits.HEARTBEAT_SECONDS_MAX)]
Count = Annotated[StrictInt, Field(ge=0, le=2**53)]


def _one_fault(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """One fault, at the field, of what is no limit: a union tells one for each of its forms, at a place below it."""
    try:
        return validate(value)
    except ValidationError:
        raise PydanticCustomError(
            "parallelism_limit",
            'must be {least} to {most}, or "unlimited"',
            {"least": limits.PARALLELISM_LIMIT_MIN, "most": limits.PARALLELISM_LIMIT_MAX},
        ) from None


ParallelismLimit = Annotated[
    Annotated[StrictInt, Field(ge=limits.PARALLELISM_LIMIT_MIN, le=limits.PARALLELISM_LIMIT_MAX)]
    | Literal["unlimited"],
    WrapValidator(_one_fault),
]


def _only_in_the_log(value: object, info: ValidationInfo) -> object:
    return value if _is_logged(info) or info.mode == "python" else None


InputCount = Annotated[Count | None, BeforeValidator(_only_in_the_log)]
InputLimit = Annotated[ParallelismLimit | None, BeforeValidator(_only_in_the_log)]
"""Inputs that the decider adds for whoever recomputes the decision; a client that sends them is not believed."""


class Message(BaseModel):
    """One JSON object on a topic."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def model_post_init(self, _context: Any) -> None:
        self.__pydantic_fields_set__.update(("type", "v"))  # always written, also when they were left to their default


class Parent(Message):
    agent_id: Id
    trigger_id: Id


class Dependency(Message):
    agent_id: Id
    conversation_id: Id


def _any_on_busy(value: object) -> object:
    """Another type than a string is an invalid choice (agent_on_busy_invalid), not an unreadable record."""
    text = value if value is None or isinstance(value, str) else json.dumps(value)
    return text and text[: limits.ID_CHARACTERS_MAX]  # a long one is no choice either, and would burst the decision


NEVER_INTERACTIVE: Final = frozenset({"task_assigned", "comment_mention", "description_write", "schedule"})


class Trigger(Message):
    """A request for a turn of an agent (berth.triggers)."""

    type: Literal["trigger"] = "trigger"
    v: SchemaVersion = 1
    id: Id
    agent_id: Id
    conversation_id: Id
    kind: Kind = "task"
    interactive: StrictBool | None = None
    on_busy: Annotated[str | None, BeforeValidator(_any_on_busy)] = None
    message: MessageText = None
    payload: Payload = None
    requested_by: Id | None = None
    created_at: Instant | None = None
    available_at: Instant | None = None
    expires_at: Instant | None = None
    decide_before: Instant | None = None
    site: Id | None = None
    worker: StrictBool | None = None
    environment_id: Id | None = None
    folder: FolderPath | None = None
    organization_id: Id | None = None
    department_id: Id | None = None
    execution_class: Literal["standard", "background"] | None = None
    parent: Parent | None = None
    restarts: Id | None = None
    priority: Annotated[StrictInt, Field(ge=-(2**53), le=2**53)] | None = None
    timeout_seconds: TimeoutSeconds | None = None
    heartbeat_seconds: HeartbeatSeconds | None = None
    max_attempts: Annotated[StrictInt, Field(ge=1, le=limits.ATTEMPTS_MAX)] | None = None
    depends_on: Annotated[tuple[Dependency, ...], Field(max_length=limits.DEPENDENCIES_MAX)] | None = None
    approval_required: StrictBool | None = None
    content_sha256: Sha256 | None = None
    default_limit: InputLimit = None
    repeats: InputCount = None

    @property
    def is_interactive(self) -> bool:
        """Whether a person waits for it; some kinds never are, whatever they say (B1)."""
        return bool(self.interactive) and self.kind not in NEVER_INTERACTIVE

    @property
    def effective_on_busy(self) -> Literal["ask", "queue", "force", "interrupt"]:
        """What on_busy means for it: nobody waits for what is not interactive (B1, B2)."""
        if not self.is_interactive or self.on_busy == "queue":
            return "queue"
        if self.on_busy == "force":
            return "force"
        return "interrupt" if self.on_busy == "interrupt" else "ask"

    @property
    def needs_site(self) -> bool:
        return bool(self.worker) or self.environment_id is not None


class Stop(Message):
    """Stop one trigger, or all of a conversation (berth.triggers). Exactly one of the two is named."""

    type: Literal["stop"] = "stop"
    v: SchemaVersion = 1
    id: Id
    agent_id: Id
    trigger_id: Id | None = None
    conversation_id: Id | None = None
    requested_by: Id | None = None
    decide_before: Instant | None = None
    repeats: InputCount = None

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if (self.trigger_id is None) == (self.conversation_id is None):
            raise PydanticCustomError("stop_target", "needs either trigger_id or conversation_id")


class Status(Message):
    """What a runner says of an attempt (berth.statuses)."""

    type: Literal["status"] = "status"
    v: SchemaVersion = 1
    agent_id: Id
    conversation_id: Id
    execution_id: Id | None = None
    status: Literal["running", "heartbeat", "paused", "finished", "failed", "stopped"]
    retryable: StrictBool | None = None
    phase: Literal["preparation", "execution"] | None = None
    error: OutcomeText = None
    result: OutcomeText = None
    at: Instant | None = None

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.execution_id is None and self.at is None:
            raise PydanticCustomError("status_attempt", "needs execution_id, or at to find the attempt by")


class Control(Message):
    """What every control of an agent carries (berth.controls)."""

    v: SchemaVersion = 1
    id: Id
    agent_id: Id
    requested_by: Id
    decide_before: Instant | None = None
    repeats: InputCount = None


class Configure(Control):
    """Settings of an agent: absent is unchanged, null is back to the default."""

    type: Literal["configure"] = "configure"
    parallelism_limit: ParallelismLimit | None = None
    agent_type: Kind | None = None
    serial: StrictBool | None = None
    default_environment_id: Id | None = None
    default_folder: FolderPath | None = None
    max_backlog_depth: Annotated[StrictInt, Field(ge=0, le=limits.BACKLOG_DEPTH_MAX)] | None = None
    run_budget: Count | None = None
    default_timeout_seconds: TimeoutSeconds | None = None
    owner: Id | None = None
    display_name: Id | None = None
    default_limit: InputLimit = None


class Pause(Control):
    type: Literal["pause"] = "pause"


class Resume(Control):
    type: Literal["resume"] = "resume"


class Archive(Control):
    type: Literal["archive"] = "archive"


class Approve(Control):
    type: Literal["approve"] = "approve"
    trigger_id: Id


class Reschedule(Control):
    type: Literal["reschedule"] = "reschedule"
    trigger_id: Id
    available_at: Instant


class ResumeTrigger(Control):
    """Queue a paused trigger again, with a new attempt."""

    type: Literal["resume_trigger"] = "resume_trigger"
    trigger_id: Id
    on_busy: Annotated[str | None, BeforeValidator(_any_on_busy)] = None


_NO_CONTENT: Final = {"v", "decide_before", "content_sha256", "default_limit", "repeats"}


def content_sha256(command: Message) -> str:
    """Digest of what the sender asked for, so that the same id with other content is noticed (F8)."""
    is_trigger = isinstance(command, Trigger)  # in a control null differs from absent, in a trigger it doesn't
    content = command.__pydantic_serializer__.to_json(
        command, exclude=_NO_CONTENT, exclude_none=is_trigger, exclude_unset=not is_trigger
    )
    return hashlib.sha256(content).hexdigest()


def stamp_content(trigger: "Trigger") -> None:
    """Give a trigger that nobody else has seen yet its digest, unless its sender gave one. A copy would cost 4 µs."""
    if trigger.content_sha256 is None:
        trigger.__dict__["content_sha256"] = content_sha256(trigger)
        trigger.__pydantic_fields_set__.add("content_sha256")


class Invalid(Message):
    """A record that could not be read, but that names an agent and an id: somebody waits for an answer to it."""

    type: Literal["invalid"] = "invalid"
    id: Id
    agent_id: Id
    reason: str
    sha256: Sha256
    bytes: Count


TimerKind = Literal["lease", "grace", "answer", "reservation", "retry", "available", "expiry", "forget"]


class Timer(Message):
    """A deadline of the agent that has come (F9). ``id`` is the trigger's; "" for what the agent itself is due."""

    type: Literal["timer"] = "timer"
    kind: TimerKind
    id: str
    deadline: Instant
    execution_id: str | None = None
    last_seen_at: Instant | None = None


class Continue(Message):
    """Work that an earlier decision noted in the state, because it was more than one step may do (F1)."""

    type: Literal["continue"] = "continue"


class Park(Message):
    """The rules failed on a timer or continuation of this agent: it dispatches nothing until it is configured (G4)."""

    type: Literal["park"] = "park"
    error: str


class LosePayload(Message):
    """A trigger's payload or message is nowhere any more (berth recover): it can't be sent to a runner again."""

    type: Literal["lose_payload"] = "lose_payload"
    trigger_id: Id


TriggerRecord = Annotated[Trigger | Stop, Field(discriminator="type")]
ControlRecord = Annotated[
    Configure | Pause | Resume | Archive | Approve | Reschedule | ResumeTrigger, Field(discriminator="type")
]
