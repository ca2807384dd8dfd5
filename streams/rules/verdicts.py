"""What the records of agents and sites have in common: causes, refusals, what was ignored, and how they are written."""

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, StrictBool

from streams.rules import limits
from streams.rules.messages import Count, Id, Instant, Message, ParallelismLimit, TimerKind

WaitReason = Literal[
    "agent_paused",
    "agent_parked",
    "conversation_busy",
    "approval_required",
    "dependency_unfinished",
    "dependency_failed",
    "dependency_unknown",
    "not_yet_available",
    "run_budget_used_up",
    "agent_parallelism_limit_reached",
    "site_unknown",
    "site_paused",
    "organization_disabled",
    "department_disabled",
    "agent_environment_folder_busy",
    "site_workers_busy",
    "site_not_answering",
]
FinalState = Literal["finished", "failed", "stopped", "expired"]
LiveState = Literal["waiting", "running", "paused"]
KnownState = Literal["waiting", "running", "paused", "finished", "failed", "stopped", "expired", "refused"]


class Written(Message):
    """A record that Berth writes: a field that has its default is left out, as absent means the default."""

    _defaults: ClassVar[tuple[tuple[str, object], ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **_kwargs: Any) -> None:
        cls._defaults = tuple(
            (name, field.default)
            for name, field in cls.model_fields.items()
            if not field.is_required() and name not in ("type", "v")
        )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        values, given = self.__dict__, self.__pydantic_fields_set__
        for name, default in self._defaults:
            if name in given and values[name] == default:
                given.discard(name)


REFUSAL_CODES: Final = (
    "invalid_record",
    "agent_on_busy_invalid",
    "request_expired",
    "trigger_id_conflict",
    "agent_not_found",
    "agent_archived",
    "agent_parallelism_limit_unsupported",
    "trigger_unknown",
    "agent_paused",
    "conversation_busy",
    "approval_required",
    "dependency_unfinished",
    "not_yet_available",
    "run_budget_used_up",
    "agent_parallelism_limit_reached",
    "force_limit_reached",
    "agent_backlog_full",
    "site_unknown",
    "site_paused",
    "organization_disabled",
    "department_disabled",
    "agent_environment_folder_busy",
    "site_workers_busy",
    "site_not_answering",
)
"""In order of precedence (B3): a request that is wrong in two ways is told the first."""


class Refusal(Written):
    """Why a command had no effect, and what its sender may want to know to choose what to do next."""

    code: str
    reason: str | None = None
    running: Count = 0
    limit: ParallelismLimit | None = None
    waiting: Count = 0
    position_if_queued: Count | None = None
    force_allowed: StrictBool = False
    holders: Annotated[tuple[Id, ...], Field(max_length=limits.HOLDERS_MAX)] = ()
    holders_count: Count = 0


class Ignored(Written):
    """Nothing to do. first_seq: the decision that answered this id first; state: the trigger's present state."""

    reason: Literal[
        "duplicate",
        "stale",
        "unknown",
        "after_final",
        "already_final",
        "already_stopping",
        "unchanged",
        "not_paused",
        "not_waiting",
    ]
    first_seq: Count | None = None
    state: KnownState | None = None


class RecordCause(Written):
    topic: str
    partition: Count
    offset: Count


class SenderCause(Written):
    decider: Id
    seq: Count
    index: Count


class TimerRef(Written):
    kind: TimerKind
    id: str
    deadline: Instant


class TimerCause(Written):
    timer: TimerRef


class ContinueCause(Written):
    continue_: Annotated[Count, Field(alias="continue")]


Cause = RecordCause | SenderCause | TimerCause | ContinueCause


def write_logged(decision: Written) -> bytes:
    """A decision's exact bytes in the log. pydantic_core.PydanticSerializationError if they could not be read back."""
    return decision.__pydantic_serializer__.to_json(decision, exclude_unset=True, by_alias=True, warnings="error")
