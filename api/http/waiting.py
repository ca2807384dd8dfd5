"""Why a trigger waits: every cause that holds now, computed from stored facts when somebody asks.

Pure: rows of the projections and the time in, causes out, in the order in which the rules look at them. The first one
is the reason that lists show. None of them holds: the trigger is about to start.

Agents and sites are decided apart, and their rows may be some decisions apart too. So what a site has already granted
is no cause although its agent has not heard of it, and what an agent was told last is one while the rows of the site
are behind.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from streams.rules.agent.rows import DEFAULT_SITE
from streams.rules.folders import path_of, segments
from streams.rules.limits import CLAIM_RESERVED_SECONDS, HOLDERS_MAX

Row = Mapping[str, Any]


class Place(NamedTuple):
    """A folder, in its compared form."""

    site: str
    environment_id: str
    path: str

    @property
    def covering(self) -> list["Place"]:
        """Those that are deleted with it if one of them is: its environment (path ""), it, and all above it."""
        parts = segments(self.path)
        paths = ["", *(path_of(parts[:depth]) for depth in range(len(parts) + 1))]
        return [self._replace(path=path) for path in paths]


class GateId(NamedTuple):
    site: str
    scope: str
    name: str


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has what the trigger waits for, or is before it. ``since``: when it got it.

    ``state``: running, granted (about to run), asking (a slot is reserved for it), waiting or paused (before it in its
    conversation, or at its site); of a conversation that it depends on: live, failed, stopped or unknown.
    """

    agent_id: str
    trigger_id: str | None
    conversation_id: str | None
    execution_id: str | None
    state: str
    since: datetime | None


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of waiting. ``since``: from when on it held this trigger up; ``until``: when it ends by itself.

    ``site``, and ``scope`` and ``name`` of the organization or department, where it is a site's.
    """

    reason: str
    released_by: str
    since: datetime | None = None
    until: datetime | None = None
    holders: tuple[Holder, ...] = ()
    holders_count: int = 0
    site: str | None = None
    scope: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Facts:
    """What is known of an agent, and of the sites that some of its waiting triggers need (waiting_facts.py)."""

    agent: Row
    slots: Sequence[Row] = ()
    """Its oldest running attempts."""
    reservations: Sequence[Row] = ()
    """Its claims that are asking or held, in start order."""
    not_answering: Mapping[str, Row] = field(default_factory=dict)
    """By site: the claim that it owes an answer to."""
    dependencies: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """By trigger: what has not finished of what it depends on."""
    in_cycles: frozenset[str] = frozenset()
    """Triggers that wait for their own conversations, by way of others; of those of which it was asked."""
    sites: Mapping[str, Row] = field(default_factory=dict)
    gates: Mapping[GateId, Row] = field(default_factory=dict)
    claims: Mapping[tuple[str, str], Row] = field(default_factory=dict)
    """By site and trigger, as the site holds them."""
    deletions: Mapping[Place, datetime] = field(default_factory=dict)
    workers: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """By site: who has a worker, the oldest first."""
    folders: Mapping[Place, Sequence[Row]] = field(default_factory=dict)
    """Who has an overlapping one, the oldest first."""
    blockers: Mapping[Place, Sequence[Row]] = field(default_factory=dict)
    """Who waits for an overlapping one and was passed too often, in start order."""


def site_of(trigger: Row) -> str | None:
    """The site whose worker or folder a trigger needs; None: none."""
    return (trigger["site"] or DEFAULT_SITE) if trigger["worker"] or trigger["environment_id"] is not None else None


def place_of(trigger: Row) -> Place | None:
    """The folder that it asks for, wherever it has not lost it."""
    site = site_of(trigger)
    if site is None or trigger["environment_id"] is None or trigger["degraded"]:
        return None
    return Place(site, trigger["environment_id"], path_of(segments(trigger["folder"] or "/")))


def gates_of(trigger: Row) -> list[GateId]:
    """The gates that it has to pass at its site."""
    site = site_of(trigger)
    names = (("organization", trigger["organization_id"]), ("department", trigger["department_id"]))
    return [] if site is None else [GateId(site, scope, name) for scope, name in names if name is not None]


def causes(facts: Facts, trigger: Row, now: datetime) -> list[Cause]:
    """Every cause for which a waiting trigger waits."""
    of_site = list(_of_site(facts, trigger))
    return [*_of_agent(facts, trigger, now), *of_site, *_of_answer(facts, trigger, {cause.reason for cause in of_site})]


# The agent


def _of_agent(facts: Facts, trigger: Row, now: datetime) -> Iterator[Cause]:
    agent, since = facts.agent, trigger["state_since"]
    if agent["archived"]:
        yield Cause("agent_archived", "nothing: it is about to be stopped", _later(agent["archived_at"], since))
    if agent["paused"]:
        yield Cause("agent_paused", "resuming the agent", _later(agent["paused_at"], since))
    if agent["parked"] is not None:
        yield Cause("agent_parked", "configuring the agent again", _later(agent["parked_at"], since))
    head = trigger["head_trigger_id"]
    if head is not None and head != trigger["trigger_id"]:
        about = agent["agent_id"], head, trigger["conversation_id"], trigger["head_execution_id"]
        holder = Holder(*about, trigger["head_state"], trigger["head_state_since"])
        released_by = f"the end of {head}, which is {trigger['head_state']} and before it in the conversation"
        yield Cause("conversation_busy", released_by, _later(holder.since, since), None, (holder,), 1)
    if trigger["place_number"] is None:
        yield from _of_people_and_dependencies(facts, trigger)
    if trigger["available_at"] > now:
        retry = "the time of its next attempt" if trigger["attempt"] else "the time from which it may start"
        yield Cause("not_yet_available", retry, since, trigger["available_at"])
    yield from _of_budget(facts, trigger)
    yield from _of_limit(facts, trigger)


def _of_people_and_dependencies(facts: Facts, trigger: Row) -> Iterator[Cause]:
    since = trigger["state_since"]
    if trigger["approval_required"] and trigger["approved_at"] is None:
        yield Cause("approval_required", "the approval of a person", since)
    unmet = facts.dependencies.get(trigger["trigger_id"], ())
    for reason, outcomes, ends_by in _DEPENDENCIES:
        released_by = ends_by
        if reason == "dependency_failed" and trigger["failures_approved"]:
            continue
        rows = [row for row in unmet if row["outcome"] in outcomes]
        if rows:
            holders = [
                Holder(
                    row["dependency_agent_id"],
                    None,
                    row["dependency_conversation_id"],
                    None,
                    row["outcome"] or "live",
                    row["told_at"],
                )
                for row in rows
            ]
            if reason == "dependency_unfinished" and trigger["trigger_id"] in facts.in_cycles:
                released_by = "stopping what waits in one of them: they wait for one another, and for this one"
            first = min(_later(holder.since, since) or since for holder in holders)
            yield Cause(reason, released_by, first, None, tuple(holders[:HOLDERS_MAX]), len(holders))


_DEPENDENCIES: Final = (
    ("dependency_unfinished", (None,), "the end of these conversations, finished"),
    (
        "dependency_failed",
        ("failed", "stopped"),
        "the approval of a person, or a later turn of these conversations that finishes",
    ),
    ("dependency_unknown", ("unknown",), "a turn of these conversations that finishes; nobody has heard of them yet"),
)


def _of_budget(facts: Facts, trigger: Row) -> Iterator[Cause]:
    """An idle trigger needs an attempt that no claim has reserved, one with a claim any."""
    agent = facts.agent
    if agent["run_budget"] is None:
        return
    reserved = 0 if trigger["claim_state"] is not None else agent["asking"] + agent["held"]
    if agent["run_budget"] > reserved:
        return
    holders = tuple(_reservation(agent, row) for row in facts.reservations) if reserved else ()
    newest = max([agent["run_budget_at"], *(row["since"] for row in facts.reservations if reserved)])
    released_by = "a higher run budget of the agent" + (", or a claim that ends before its attempt" if reserved else "")
    since = _later(newest, trigger["state_since"])
    yield Cause("run_budget_used_up", released_by, since, None, holders[:HOLDERS_MAX], reserved)


def _of_limit(facts: Facts, trigger: Row) -> Iterator[Cause]:
    """Running attempts, and older claims that a slot is reserved for, fill the agent."""
    agent = facts.agent
    limit, running = agent["max_parallel"], agent["running"]
    if limit is None or (trigger["claim_state"] == "asking" and _forces(trigger)):
        return
    reserved = [row for row in facts.reservations if row["state"] == "asking" and _key(row) < _key(trigger)]
    taken = running + len(reserved)
    if taken < limit:
        return
    over = "an ask that ends" if not running else "the end of a running attempt"
    released_by = f"the end of {taken - limit + 1} running attempts" if taken > limit else over
    holders = [
        *(
            Holder(
                agent["agent_id"],
                row["trigger_id"],
                row["conversation_id"],
                row["execution_id"],
                "running",
                row["dispatched_at"],
            )
            for row in facts.slots
        ),
        *(_reservation(agent, row) for row in reserved),
    ]
    newest = [*(row["newest_at"] for row in facts.slots[:1]), *(row["since"] for row in reserved)]
    yield Cause(
        "agent_parallelism_limit_reached",
        f"{released_by}, or a higher limit",
        _later(max(newest, default=None), trigger["state_since"]),
        None,
        tuple(holders[:HOLDERS_MAX]),
        taken,
    )


def _reservation(agent: Row, row: Row) -> Holder:
    state = "granted" if row["state"] == "held" else "asking"
    return Holder(agent["agent_id"], row["trigger_id"], row["conversation_id"], None, state, row["since"])


def _forces(trigger: Row) -> bool:
    return bool(trigger["interactive"]) and trigger["on_busy"] == "force"


def _key(row: Row) -> tuple[datetime, datetime, bytes]:
    return row["available_at"], row["created_at"], row["trigger_id"].encode()


# The site


def _of_site(facts: Facts, trigger: Row) -> Iterator[Cause]:
    """What stands in its way at its site, whether it has asked already or not."""
    site_id = site_of(trigger)
    if site_id is None or trigger["claim_state"] == "held":
        return
    site, own = facts.sites.get(site_id), facts.claims.get((site_id, trigger["trigger_id"]))
    if own is not None and own["granted_at"] is not None:
        return
    since = trigger["state_since"]
    if site is None or not site["created"]:
        if site_id != DEFAULT_SITE:
            yield Cause("site_unknown", f"configuring site {site_id}", since, site=site_id)
        return
    if site["paused"]:
        yield Cause("site_paused", f"resuming site {site_id}", _later(site["paused_at"], since), site=site_id)
    yield from _of_gates(facts, trigger)
    place = _present_place(facts, trigger, own)
    if place is not None:
        yield from _of_folder(facts, trigger, place)
    if trigger["worker"] and site["workers"] >= site["capacity"]:
        rows = facts.workers.get(site_id, ())
        newest = [site["capacity_at"], *(row["newest_at"] for row in rows[:1])]
        yield Cause(
            "site_workers_busy",
            f"the end of a run that has one of the {site['capacity']} workers of site {site_id}, or a higher capacity"
            if site["capacity"]
            else f"a higher capacity of site {site_id}, which has no workers",
            _later(max(newest), since),
            None,
            tuple(map(_granted, rows)),
            site["workers"],
            site_id,
        )


def _of_gates(facts: Facts, trigger: Row) -> Iterator[Cause]:
    since = trigger["state_since"]
    gates = [(id, facts.gates[id]) for id in gates_of(trigger) if id in facts.gates]
    for id, gate in gates:
        if not gate["enabled"]:
            released_by = f"enabling {id.scope} {id.name} at site {id.site}"
            yield Cause(f"{id.scope}_disabled", released_by, _later(gate["disabled_at"], since), None, (), 0, *id)
    for id, gate in gates:
        if gate["run_budget"] == 0:
            released_by = f"a higher run budget of {id.scope} {id.name} at site {id.site}"
            yield Cause("run_budget_used_up", released_by, _later(gate["run_budget_at"], since), None, (), 0, *id)


def _present_place(facts: Facts, trigger: Row, own: Row | None) -> Place | None:
    """Its folder, unless that was deleted, of which its agent may not have heard."""
    place = place_of(trigger)
    if place is None or (own is not None and own["path"] is None):
        return None
    deleted = [facts.deletions[one] for one in place.covering if one in facts.deletions]
    return None if any(trigger["accepted_at"] <= at for at in deleted) else place


def _of_folder(facts: Facts, trigger: Row, place: Place) -> Iterator[Cause]:
    rows = facts.folders.get(place, ())
    key = (*_key(trigger), facts.agent["agent_id"].encode())
    blockers = [row for row in facts.blockers.get(place, ()) if (*_key(row), row["agent_id"].encode()) < key]
    if not (rows or blockers):
        return
    count = (rows[0]["holders_count"] if rows else 0) + len(blockers)
    holders = [
        *map(_granted, rows),
        *(Holder(row["agent_id"], row["trigger_id"], None, None, "waiting", row["blocks_since"]) for row in blockers),
    ]
    newest = [*(row["newest_at"] for row in rows[:1]), *(row["blocks_since"] for row in blockers)]
    released_by = (
        f"the end of those that have a folder overlapping {place.path}, or were passed too often waiting for one"
    )
    yield Cause(
        "agent_environment_folder_busy",
        released_by,
        _later(max(newest), trigger["state_since"]),
        None,
        tuple(holders[:HOLDERS_MAX]),
        count,
        place.site,
    )


def _granted(row: Row) -> Holder:
    state = "running" if row["execution_id"] is not None else "granted"
    about = row["agent_id"], row["trigger_id"], row["conversation_id"], row["execution_id"]
    return Holder(*about, state, row["granted_at"])


# The site's answer


def _of_answer(facts: Facts, trigger: Row, known: set[str]) -> Iterator[Cause]:
    site_id, state = site_of(trigger), trigger["claim_state"]
    if site_id is None:
        return
    own = facts.claims.get((site_id, trigger["trigger_id"]))
    if own is not None and own["granted_at"] is not None:
        return
    answer = f"the answer of site {site_id}"
    if state == "asking":
        until = trigger["claim_asked_at"] + timedelta(seconds=CLAIM_RESERVED_SECONDS)
        yield Cause("site_asked", answer, trigger["claim_asked_at"], until, site=site_id)
    elif state == "standing" and trigger["claim_reason"] == "site_not_answering":
        yield Cause("site_not_answering", f"{answer}, which is late", trigger["claim_since"], site=site_id)
    elif state is None and site_id in facts.not_answering:
        silent = facts.not_answering[site_id]
        holder = Holder(facts.agent["agent_id"], silent["trigger_id"], None, None, "waiting", silent["since"])
        released_by = f"{answer} to an earlier claim"
        since = _later(silent["since"], trigger["state_since"])
        yield Cause("site_not_answering", released_by, since, None, (holder,), 1, site_id)
    elif state == "standing" and own is None and trigger["claim_reason"] not in known:
        # Its agent has heard of more than the rows of the site tell: who holds what is not known here yet.
        yield Cause(trigger["claim_reason"], f"{answer}, which told so", trigger["claim_since"], site=site_id)


def _later(cause: datetime | None, trigger: datetime) -> datetime | None:
    """A cause holds a trigger up from when both are there; None when the cause's own beginning isn't known."""
    return None if cause is None else max(cause, trigger)
