"""The rows of a site's state. Instants are microseconds; an absent field means its default."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

GateScope = Literal["organization", "department"]


class ClaimId(NamedTuple):
    """A claim at a site is known by the trigger that it is for."""

    agent_id: str
    trigger_id: str


@dataclass(slots=True)
class SiteRow:
    """A site's header."""

    seq: int = 0
    prev: str | None = None
    created: bool = False
    """Claims at a site that nobody configured wait as site_unknown."""
    capacity: int = 0
    paused: bool = False
    todo: list[tuple[str, ...]] = field(default_factory=list)
    """Walks not at their end: ("site",), ("gate", scope, name), ("deletion", environment, path)."""
    todo_cursor: tuple[str, str] = ("", "")
    """The last claim that the first walk has seen."""
    todo_grant: bool = False
    """More may be granted than one step does."""
    todo_since: int | None = None


@dataclass(slots=True)
class GateRow:
    """Work that carries this organization or department may start only while the gate is open."""

    enabled: bool = True
    run_budget: int | None = None
    """Attempts left to grant; None: not bounded."""
    budget_seq: int = 0
    """The decision that set it: what was granted before took nothing from it, and gives nothing back to it."""

    @property
    def is_open(self) -> bool:
        return self.enabled and self.run_budget != 0


@dataclass(slots=True)
class DeletionRow:
    """A folder or environment that was deleted: triggers accepted before do without it (D5)."""

    deleted_at: int


@dataclass(slots=True)
class ClaimRow:
    """One claim, waiting or granted."""

    agent_id: str
    trigger_id: str
    n: int
    available_at: int
    created_at: int
    accepted_at: int
    worker: bool = False
    environment_id: str | None = None
    path: str | None = None
    """In its compared form; None with an environment: deleted since."""
    organization_id: str | None = None
    department_id: str | None = None
    granted: bool = False
    granted_seq: int | None = None
    """The decision that granted it."""
    passed: int = 0
    """Grants to younger claims while this was the oldest that they passed."""

    @property
    def id(self) -> ClaimId:
        return ClaimId(self.agent_id, self.trigger_id)

    @property
    def gates(self) -> list[tuple[GateScope, str]]:
        found: list[tuple[GateScope, str]] = []
        if self.organization_id is not None:
            found.append(("organization", self.organization_id))
        if self.department_id is not None:
            found.append(("department", self.department_id))
        return found
