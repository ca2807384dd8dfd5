"""Why a trigger waits, from the folded state of its agent and, where it has a claim, of its site.

Every cause that holds is given, in the order in which the rules look at them (B3): the first is the one that lists and
shares count. None: it is about to start, or its claim's answer is on its way (``site_asked``).
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, Literal, NamedTuple

from streams.rules import limits
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.folders import overlap
from streams.rules.site.rows import ClaimId, ClaimRow
from streams.rules.site.state import Site, key_of, place_of
from streams.rules.verdicts import WaitReason

Reason = WaitReason | Literal["site_asked"]
"""What B3 names, and ``site_asked``: the claim is sent and not answered yet."""

SITE_REASONS: Final[frozenset[Reason]] = frozenset(
    (
        "site_asked",
        "site_unknown",
        "site_paused",
        "organization_disabled",
        "department_disabled",
        "agent_environment_folder_busy",
        "site_workers_busy",
        "site_not_answering",
    )
)


class Holder(NamedTuple):
    """A trigger that has what another one waits for."""

    agent_id: str
    trigger_id: str


class Cause(NamedTuple):
    """``until``: when it ends by itself, in microseconds. At most 20 holders, the oldest first, and their number."""

    reason: Reason
    until: int | None = None
    holders: tuple[Holder, ...] = ()
    holders_count: int = 0


def causes(agent: Agent, row: TriggerRow, at: int, site: Site | None) -> list[Cause]:
    """Every cause for which a waiting trigger waits at an instant, the first by precedence first."""
    assert row.state == "waiting"
    found: list[Cause] = []
    if agent.row.paused:
        found.append(Cause("agent_paused"))
    if agent.row.parked is not None:
        found.append(Cause("agent_parked"))
    head = agent.head(row.conversation_id)
    is_head = head is not None and head.trigger_id == row.trigger_id
    if head is not None and not is_head:
        found.append(Cause("conversation_busy", None, (Holder(agent.agent_id, head.trigger_id),), 1))
    if row.approval_required and not row.approved:
        found.append(Cause("approval_required"))
    found.extend(Cause(reason) for reason in _dependencies(row))
    if row.available_at > at:
        found.append(Cause("not_yet_available", row.available_at))
    if found and not is_head:
        return found
    if row.claim_state is None:
        found.extend(_in_the_agent(agent, row))
    else:
        found.extend(_at_the_site(agent, row, site))
    return found


def first_cause(agent: Agent, row: TriggerRow, at: int, site: Site | None) -> Cause | None:
    """The cause that counts; None: it is about to start."""
    return next(iter(causes(agent, row, at, site)), None)


def _dependencies(row: TriggerRow) -> Iterator[WaitReason]:
    outcomes = {outcome for outcome in row.outcomes if outcome != "finished"}
    if None in outcomes:
        yield "dependency_unfinished"
    if not row.failures_approved and outcomes & {"failed", "stopped"}:
        yield "dependency_failed"
    if "unknown" in outcomes:
        yield "dependency_unknown"


def _in_the_agent(agent: Agent, row: TriggerRow) -> Iterator[Cause]:
    """Of a trigger without a claim: what its own agent lacks for it."""
    if not agent.budget_left:
        yield Cause("run_budget_used_up")
    if row.site_id in agent.mute:
        yield Cause("site_not_answering")
    elif not agent.room_for(row.key):
        yield _full(agent)


def _full(agent: Agent) -> Cause:
    ids = [*agent.executions.values(), *(key.id.decode() for key in agent.asking)]
    return Cause("agent_parallelism_limit_reached", None, *_bounded(Holder(agent.agent_id, id) for id in ids))


def _at_the_site(agent: Agent, row: TriggerRow, site: Site | None) -> Iterator[Cause]:
    """Of a trigger with a claim: what the site lacks for it, as far as the site's decisions are known."""
    if row.claim_state == "held":
        if agent.row.run_budget == 0:
            yield Cause("run_budget_used_up")
        if not agent.has_room:
            yield _full(agent)
        return
    if row.mute:
        yield Cause("site_not_answering")
    claim = site.claims.get(ClaimId(agent.agent_id, row.trigger_id)) if site is not None else None
    if site is None or claim is None or claim.granted:
        yield Cause("site_asked")
        return
    reason = site.why_waiting(claim)
    yield Cause(reason, None, *_bounded(holders_at_site(site, claim, reason)))


def holders_at_site(site: Site, claim: ClaimRow, reason: WaitReason) -> Iterator[Holder]:
    """Who stands in the claim's way: those with workers, with overlapping folders, or blocking for their turn."""
    if reason == "site_workers_busy":
        yield from (Holder(one.agent_id, one.trigger_id) for one in _granted(site) if one.worker)
    elif reason == "agent_environment_folder_busy":
        holders = [one for one in _granted(site) if _overlaps(claim, one)]
        if not holders:  # passed too often: its turn comes first
            holders = [
                one
                for one in site.claims.values()
                if one.passed >= limits.CLAIM_PASSES_MAX and key_of(one) < key_of(claim) and _overlaps(claim, one)
            ]
        yield from (Holder(one.agent_id, one.trigger_id) for one in holders)


def _granted(site: Site) -> Iterator[ClaimRow]:
    return (site.claims[site.by_key[key]] for key in site.granted)


def _overlaps(claim: ClaimRow, other: ClaimRow) -> bool:
    one, two = place_of(claim), place_of(other)
    if one is None or two is None or one.environment_id != two.environment_id:
        return False
    return overlap(one.segments, two.segments)


def _bounded(holders: Iterable[Holder]) -> tuple[tuple[Holder, ...], int]:
    found = list(holders)
    return tuple(islice(found, limits.HOLDERS_MAX)), len(found)
