"""Why a trigger waits: every cause that holds, who holds what it waits for, and what would release it.

Pure: facts in, causes out, in the order in which the rules look at them (B3). The first one is the reason that lists
and shares count. None of them holds: the trigger is about to start. The facts come from folded decisions
(folded_facts.py) or from rows of the projections (api/http/waiting.py): what is not known there (most instants, of a
fold) is None, and the causes and their holders are the same.

Agents and sites are decided apart, and what is known of them may be some decisions apart too. So what a site has
already granted is no cause although its agent has not heard of it, and what an agent was told last is one while the
site is behind.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from streams.rules.agent.rows import DEFAULT_SITE, ClaimState
from streams.rules.folders import path_of, segments
from streams.rules.limits import CLAIM_RESERVED_SECONDS, HOLDERS_MAX
from streams.rules.order import SECOND, OrderKey
from streams.rules.verdicts import WaitReason

Reason = WaitReason | Literal["agent_archived", "site_asked"]
"""What B3 names, and ``site_asked``: the claim is sent and not answered yet."""


class TriggerId(NamedTuple):
    """Which trigger."""

    agent_id: str
    trigger_id: str


class PlaceId(NamedTuple):
    """A folder, in its compared form."""

    site: str
    environment_id: str
    path: str

    @property
    def covering(self) -> list["PlaceId"]:
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
    """Who has what the trigger waits for, or is before it. ``since``: when it got it, in microseconds; None: not known.

    ``state``: running, granted (about to run, as far as is known), asking (a slot is reserved for it), waiting or
    paused (before it in its conversation, or at its site); of a conversation that it depends on: live, failed, stopped
    or unknown.
    """

    agent_id: str
    trigger_id: str | None
    conversation_id: str | None
    execution_id: str | None
    state: str
    since: int | None = None

    @property
    def who(self) -> tuple[str, str | None, str | None]:
        """Which trigger of which agent, or which conversation."""
        return self.agent_id, self.trigger_id, self.conversation_id if self.trigger_id is None else None


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of waiting. ``since``: from when on it held this trigger up; ``until``: when it ends by itself.

    Instants in microseconds; None: not known, or it doesn't. At most 20 holders, the oldest first, and their number.
    ``site``, and ``scope`` and ``name`` of the organization or department, where it is a site's.
    """

    reason: Reason
    released_by: str
    since: int | None = None
    until: int | None = None
    holders: tuple[Holder, ...] = ()
    holders_count: int = 0
    site: str | None = None
    scope: str | None = None
    name: str | None = None


class Reservation(NamedTuple):
    """A claim of the agent that reserves a slot (state asking) or holds a grant and no slot yet (granted)."""

    key: OrderKey
    holder: Holder


class Holders(NamedTuple):
    """The oldest of those that have something, how many there are, and when the newest got it."""

    oldest: Sequence[Holder] = ()
    number: int = 0
    newest_at: int | None = None


class SiteFacts(NamedTuple):
    """A site's own settings. ``workers``: how many of its pool are in use."""

    created: bool
    paused: bool = False
    paused_at: int | None = None
    capacity: int = 0
    capacity_at: int | None = None
    workers: int = 0


class GateFacts(NamedTuple):
    enabled: bool
    disabled_at: int | None
    run_budget: int | None
    run_budget_at: int | None


class OwnClaim(NamedTuple):
    """The trigger's claim as its site holds it."""

    is_granted: bool
    has_folder: bool


class Trigger(Protocol):
    """A waiting trigger, as its agent knows it (TriggerRow, or a row of the projections)."""

    @property
    def trigger_id(self) -> str: ...
    @property
    def conversation_id(self) -> str: ...
    @property
    def key(self) -> OrderKey: ...
    @property
    def available_at(self) -> int: ...
    @property
    def accepted_at(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def place(self) -> tuple[int, int] | None: ...
    @property
    def approval_required(self) -> bool: ...
    @property
    def approved(self) -> bool: ...
    @property
    def failures_approved(self) -> bool: ...
    @property
    def on_busy(self) -> str: ...
    @property
    def site_id(self) -> str | None: ...
    @property
    def worker(self) -> bool: ...
    @property
    def environment_id(self) -> str | None: ...
    @property
    def folder(self) -> str | None: ...
    @property
    def degraded(self) -> bool: ...
    @property
    def organization_id(self) -> str | None: ...
    @property
    def department_id(self) -> str | None: ...
    @property
    def claim_state(self) -> ClaimState | None: ...
    @property
    def asked_at(self) -> int | None: ...
    @property
    def mute(self) -> bool:
        """Its site has not answered its claim in time."""


class Facts(Protocol):
    """What is known of one agent, and of the sites that its waiting triggers need."""

    # The agent

    @property
    def agent_id(self) -> str: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def running(self) -> int: ...
    @property
    def run_budget(self) -> int | None: ...
    @property
    def run_budget_at(self) -> int | None: ...
    @property
    def reserved(self) -> int:
        """How many claims reserve something of the budget."""

    def held_back_by(self) -> Iterable[tuple[Literal["agent_archived", "agent_paused", "agent_parked"], int | None]]:
        """What keeps everything of the agent from starting, and since when."""

    def slots(self) -> Holders:
        """Its running attempts."""

    def reservations(self) -> Sequence[Reservation]:
        """Its claims, in start order; at least as many as fill it."""

    def silent(self, site: str) -> Holder | None:
        """The claim that this site owes an answer to, past its time."""

    # One of its triggers

    def waits_since(self, trigger: Trigger) -> int | None: ...
    def before(self, trigger: Trigger) -> Holder | None:
        """The head of its conversation; None: that is itself."""

    def unmet(self, trigger: Trigger) -> Sequence[Holder]:
        """The conversations that it depends on that have not finished, as it was told last."""

    def is_in_cycle(self, trigger: Trigger) -> bool:
        """Whether it is known to wait for its own conversation, by way of others."""

    def claim(self, trigger: Trigger) -> OwnClaim | None:
        """As its site holds it."""

    def told(self, trigger: Trigger) -> tuple[Reason, int | None] | None:
        """What its site answered to its standing claim, and when."""

    def claim_since(self, trigger: Trigger) -> int | None:
        """When its claim came into its state."""

    # Sites

    def site(self, site: str) -> SiteFacts | None:
        """None: nothing is known of it, not even whether it exists."""

    def gate(self, gate: GateId) -> GateFacts | None:
        """None: nobody ever changed it."""

    def deleted_at(self, place: PlaceId) -> int | None: ...
    def workers(self, site: str) -> Holders:
        """Who has a worker of its pool."""

    def folders(self, place: PlaceId) -> Holders:
        """Who has an overlapping folder."""

    def blockers(self, place: PlaceId) -> Sequence[Reservation]:
        """Who waits for an overlapping folder, was passed too often and is behind no closed gate, in start order."""


def place_of(trigger: Trigger) -> PlaceId | None:
    """The folder that it asks for, wherever it has not lost it."""
    if trigger.site_id is None or trigger.environment_id is None or trigger.degraded:
        return None
    return PlaceId(trigger.site_id, trigger.environment_id, path_of(segments(trigger.folder or "/")))


def gates_of(trigger: Trigger) -> list[GateId]:
    """The gates that it has to pass at its site."""
    names = (("organization", trigger.organization_id), ("department", trigger.department_id))
    return [
        GateId(trigger.site_id, scope, name)
        for scope, name in names
        if trigger.site_id is not None and name is not None
    ]


def causes(facts: Facts, trigger: Trigger, at: int) -> list[Cause]:
    """Every cause for which a waiting trigger waits at an instant."""
    return list(_all(facts, trigger, at))


def first_cause(facts: Facts, trigger: Trigger, at: int) -> Cause | None:
    """The cause that counts; None: it is about to start."""
    return next(_all(facts, trigger, at), None)


def _all(facts: Facts, trigger: Trigger, at: int) -> Iterator[Cause]:
    yield from of_agent(facts, trigger, at)
    of_site: list[Reason] = []
    for cause in _of_site(facts, trigger):
        of_site.append(cause.reason)
        yield cause
    yield from of_answer(facts, trigger, of_site)


# The agent


def of_agent(facts: Facts, trigger: Trigger, at: int) -> Iterator[Cause]:
    """The causes that lie with its own agent, the limit last."""
    since = facts.waits_since(trigger)
    for held_back, begun in facts.held_back_by():
        yield Cause(held_back, _HELD_BACK[held_back], _later(begun, since))
    head = facts.before(trigger)
    if head is not None:
        released_by = f"the end of {head.trigger_id}, which is {head.state} and before it in the conversation"
        yield Cause("conversation_busy", released_by, _later(head.since, since), None, (head,), 1)
    if trigger.place is None:  # who has its place is past them
        yield from _of_people_and_dependencies(facts, trigger, since)
    if trigger.available_at > at:
        retry = "the time of its next attempt" if trigger.attempt else "the time from which it may start"
        yield Cause("not_yet_available", retry, since, trigger.available_at)
    yield from _of_budget(facts, trigger, since)
    yield from _of_limit(facts, trigger, since)


_HELD_BACK: Final = {
    "agent_archived": "nothing: it is about to be stopped",
    "agent_paused": "resuming the agent",
    "agent_parked": "configuring the agent again",
}


def _of_people_and_dependencies(facts: Facts, trigger: Trigger, since: int | None) -> Iterator[Cause]:
    if trigger.approval_required and not trigger.approved:
        yield Cause("approval_required", "the approval of a person", since)
    unmet = facts.unmet(trigger)
    for reason, states, released_by in _DEPENDENCIES if unmet else ():
        holders = [one for one in unmet if one.state in states]
        if not holders or (reason == "dependency_failed" and trigger.failures_approved):
            continue
        ends_by = released_by
        if reason == "dependency_unfinished" and facts.is_in_cycle(trigger):
            ends_by = "stopping what waits in one of them: they wait for one another, and for this one"
        known = [one.since for one in holders if one.since is not None]
        begun = _later(min(known), since) if len(known) == len(holders) else None
        yield Cause(reason, ends_by, begun, None, tuple(holders[:HOLDERS_MAX]), len(holders))


_DEPENDENCIES: Final[tuple[tuple[Reason, tuple[str, ...], str], ...]] = (
    ("dependency_unfinished", ("live",), "the end of these conversations, finished"),
    (
        "dependency_failed",
        ("failed", "stopped"),
        "the approval of a person, or a later turn of these conversations that finishes",
    ),
    ("dependency_unknown", ("unknown",), "a turn of these conversations that finishes; nobody has heard of them yet"),
)


def _of_budget(facts: Facts, trigger: Trigger, since: int | None) -> Iterator[Cause]:
    """An idle trigger needs an attempt that no claim has reserved, one with a claim any."""
    if facts.run_budget is None:
        return
    reserved = 0 if trigger.claim_state is not None else facts.reserved
    if facts.run_budget > reserved:
        return
    holders = tuple(one.holder for one in facts.reservations()) if reserved else ()
    begun = _newest([facts.run_budget_at, *(holder.since for holder in holders)])
    released_by = "a higher run budget of the agent" + (", or a claim that ends before its attempt" if reserved else "")
    yield Cause("run_budget_used_up", released_by, _later(begun, since), None, holders[:HOLDERS_MAX], reserved)


def _of_limit(facts: Facts, trigger: Trigger, since: int | None) -> Iterator[Cause]:
    """Running attempts, and older claims that a slot is reserved for, fill the agent."""
    limit, running = facts.limit, facts.running
    if limit is None or (trigger.claim_state == "asking" and trigger.on_busy == "force"):
        return
    key = trigger.key
    reserved = [one.holder for one in facts.reservations() if one.holder.state == "asking" and one.key < key]
    taken = running + len(reserved)
    if taken < limit:
        return
    over = "an ask that ends" if not running else "the end of a running attempt"
    released_by = f"the end of {taken - limit + 1} running attempts" if taken > limit else over
    slots = facts.slots()
    begun = _newest([*([slots.newest_at] if running else []), *(holder.since for holder in reserved)])
    yield Cause(
        "agent_parallelism_limit_reached",
        f"{released_by}, or a higher limit",
        _later(begun, since),
        None,
        tuple([*slots.oldest, *reserved][:HOLDERS_MAX]),
        taken,
    )


# The site


def _of_site(facts: Facts, trigger: Trigger) -> Iterator[Cause]:
    """What stands in its way at its site, whether it has asked already or not."""
    site_id = trigger.site_id
    if site_id is None or trigger.claim_state == "held":
        return
    site, own = facts.site(site_id), facts.claim(trigger)
    if site is None or (own is not None and own.is_granted):
        return
    since = facts.waits_since(trigger)
    if not site.created:
        if site_id != DEFAULT_SITE:
            yield Cause("site_unknown", f"configuring site {site_id}", since, site=site_id)
        return
    if site.paused:
        yield Cause("site_paused", f"resuming site {site_id}", _later(site.paused_at, since), site=site_id)
    yield from _of_gates(facts, trigger, since)
    place = _present_place(facts, trigger, own)
    if place is not None:
        yield from _of_folder(facts, trigger, place, since)
    if trigger.worker and site.workers >= site.capacity:
        workers = facts.workers(site_id)
        yield Cause(
            "site_workers_busy",
            f"the end of a run that has one of the {site.capacity} workers of site {site_id}, or a higher capacity"
            if site.capacity
            else f"a higher capacity of site {site_id}, which has no workers",
            _later(_newest([site.capacity_at, *([workers.newest_at] if workers.oldest else [])]), since),
            None,
            tuple(workers.oldest[:HOLDERS_MAX]),
            site.workers,
            site_id,
        )


def _of_gates(facts: Facts, trigger: Trigger, since: int | None) -> Iterator[Cause]:
    gates = [(id, gate) for id in gates_of(trigger) if (gate := facts.gate(id)) is not None]
    for id, gate in gates:
        if not gate.enabled:
            reason: Reason = "organization_disabled" if id.scope == "organization" else "department_disabled"
            released_by = f"enabling {id.scope} {id.name} at site {id.site}"
            yield Cause(reason, released_by, _later(gate.disabled_at, since), None, (), 0, *id)
    for id, gate in gates:
        if gate.run_budget == 0:
            released_by = f"a higher run budget of {id.scope} {id.name} at site {id.site}"
            yield Cause("run_budget_used_up", released_by, _later(gate.run_budget_at, since), None, (), 0, *id)


def _present_place(facts: Facts, trigger: Trigger, own: OwnClaim | None) -> PlaceId | None:
    """Its folder, unless that was deleted, of which its agent may not have heard."""
    place = place_of(trigger)
    if place is None or (own is not None and not own.has_folder):
        return None
    deleted = (facts.deleted_at(one) for one in place.covering)
    return None if any(at is not None and trigger.accepted_at <= at for at in deleted) else place


def _of_folder(facts: Facts, trigger: Trigger, place: PlaceId, since: int | None) -> Iterator[Cause]:
    holding = facts.folders(place)
    key = trigger.key, facts.agent_id.encode()
    blockers = [one.holder for one in facts.blockers(place) if (one.key, one.holder.agent_id.encode()) < key]
    count = holding.number + len(blockers)
    if not count:
        return
    begun = _newest([*([holding.newest_at] if holding.number else []), *(holder.since for holder in blockers)])
    yield Cause(
        "agent_environment_folder_busy",
        f"the end of those that have a folder overlapping {place.path}, or were passed too often waiting for one",
        _later(begun, since),
        None,
        tuple([*holding.oldest, *blockers][:HOLDERS_MAX]),
        count,
        place.site,
    )


# The site's answer


def of_answer(facts: Facts, trigger: Trigger, known: Sequence[Reason] = ()) -> Iterator[Cause]:
    """What its site still has to say. ``known``: the causes at the site that are told already."""
    site_id, state = trigger.site_id, trigger.claim_state
    if site_id is None:
        return
    own = facts.claim(trigger)
    if own is not None and own.is_granted:
        return
    answer = f"the answer of site {site_id}"
    if state == "asking":
        asked_at = trigger.asked_at
        assert asked_at is not None
        until = asked_at + CLAIM_RESERVED_SECONDS * SECOND
        yield Cause("site_asked", answer, asked_at, until, site=site_id)
    elif state == "standing" and trigger.mute:
        yield Cause("site_not_answering", f"{answer}, which is late", facts.claim_since(trigger), site=site_id)
    elif state is None:
        silent = facts.silent(site_id)
        if silent is not None:
            since = _later(silent.since, facts.waits_since(trigger))
            yield Cause("site_not_answering", f"{answer} to an earlier claim", since, None, (silent,), 1, site_id)
    elif state == "standing" and own is None:
        # Its agent has heard of more than is known of the site: who holds what is not known here.
        reason, since = facts.told(trigger) or ("site_asked", None)
        if reason not in known:
            yield Cause(reason, f"{answer}, which told so", since, site=site_id)


def _later(cause: int | None, trigger: int | None) -> int | None:
    """A cause holds a trigger up from when both are there; None where either's beginning isn't known."""
    return None if cause is None or trigger is None else max(cause, trigger)


def _newest(instants: Iterable[int | None]) -> int | None:
    """The latest; None where one isn't known, or there is none."""
    found = list(instants)
    known = [one for one in found if one is not None]
    return max(known) if known and len(known) == len(found) else None
