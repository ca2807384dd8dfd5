"""What another policy would have done with recorded traffic: who would have waited less, who more.

The stretch is run twice by the real deciders, once as it was and once changed, and the two are compared: so whatever
the replay can't reproduce is in both. How far the unchanged run is from what was recorded is given beside, and what
nobody can know is counted and said.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from streams.audit.simulate import EVERY_AGENT, Change, Durations, Run, Simulation
from streams.audit.traffic import Traffic, Wait
from streams.rules.messages import Stop
from streams.rules.order import SECOND

SAME_SECONDS: Final = 0.001
"""Waits that differ by no more are the same."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long triggers waited for their first start, in seconds. Those not started by the end count up to it."""

    triggers: int
    not_started: int
    mean: float
    p50: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True)
class Effect:
    """``utilisation``: of the slots that the limit gives, or how many ran on average where there is no limit.

    ``gained``, ``lost``: triggers that waited less, and longer; ``only_before``, ``only_after``: that got in only then.
    """

    name: str
    before: Waiting
    after: Waiting
    gained: int
    lost: int
    only_before: int
    only_after: int
    utilisation_before: float | None = None
    utilisation_after: float | None = None


@dataclass(frozen=True, slots=True)
class SiteEffect:
    """Workers of a pool: how many, and which share of the time they were in use."""

    site: str
    capacity_before: int
    capacity_after: int
    utilisation_before: float | None
    utilisation_after: float | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """Something that the log can't tell, and in how many cases it matters."""

    what: str
    count: int


@dataclass(frozen=True, slots=True)
class WhatIf:
    """``recorded``: what was; ``as_replayed``: the same, unchanged, by the replay. Effects, the largest first."""

    since: int
    until: int
    decisions: int
    recorded: Waiting
    as_replayed: Effect
    total: Effect
    agents: tuple[Effect, ...]
    organizations: tuple[Effect, ...]
    sites: tuple[SiteEffect, ...]
    without_effect: tuple[str, ...]
    """Changes that could do nothing, and why."""
    unknown: tuple[Unknown, ...]


def what_if(traffic: Traffic, change: Change) -> WhatIf:
    """Run the traffic as it was and changed, and compare."""
    durations = Durations(traffic.attempts.items())
    before = Simulation(traffic, Change(), durations).go()
    after = Simulation(traffic, change, durations).go()
    until, length = traffic.until, traffic.until - traffic.begins_at
    recorded = {key: wait for key, wait in traffic.waits.items() if key in before.waits}
    agents = [_agent(name, before, after, until, length) for name in sorted({key[0] for key in _keys(before, after)})]
    organizations = _by_organization(before, after)
    return WhatIf(
        since=traffic.begins_at,
        until=until,
        decisions=before.decisions + after.decisions,
        recorded=_waiting(traffic.waits.values(), until),
        as_replayed=_effect("as replayed", recorded, before.waits, until),
        total=_effect("all", before.waits, after.waits, until),
        agents=tuple(sorted(agents, key=_weight)),
        organizations=tuple(sorted((_effect(name, *pair, until) for name, pair in organizations.items()), key=_weight)),
        sites=tuple(
            SiteEffect(
                site,
                before.capacities.get(site, capacity),
                capacity,
                _share(before.busy_workers[site], before.capacities.get(site, capacity), length),
                _share(after.busy_workers[site], capacity, length),
            )
            for site, capacity in sorted(after.capacities.items())
        ),
        without_effect=tuple(_without_effect(change, before, after)),
        unknown=tuple(_unknown(traffic, before, after)),
    )


Waits = Mapping[tuple[str, str], Wait]


def _keys(before: Run, after: Run) -> list[tuple[str, str]]:
    return sorted({**before.waits, **after.waits})


def _weight(effect: Effect) -> tuple[float, str]:
    """Those for whom most changed come first."""
    return -abs(_total(effect.after) - _total(effect.before)), effect.name


def _total(waiting: Waiting) -> float:
    return waiting.mean * waiting.triggers


def _agent(agent_id: str, before: Run, after: Run, until: int, length: int) -> Effect:
    waits_before, waits_after = (
        {key: wait for key, wait in run.waits.items() if key[0] == agent_id} for run in (before, after)
    )
    share_before, share_after = (
        _share(run.busy[agent_id], run.limits.get(agent_id), length) for run in (before, after)
    )
    return _effect(agent_id, waits_before, waits_after, until, share_before, share_after)


def _by_organization(before: Run, after: Run) -> dict[str, tuple[Waits, Waits]]:
    found: dict[str, tuple[dict[tuple[str, str], Wait], dict[tuple[str, str], Wait]]] = defaultdict(lambda: ({}, {}))
    for number, run in enumerate((before, after)):
        for key, wait in run.waits.items():
            if wait.organization_id is not None:
                found[wait.organization_id][number][key] = wait
    return dict(found)


def _effect(
    name: str,
    before: Waits,
    after: Waits,
    until: int,
    share_before: float | None = None,
    share_after: float | None = None,
) -> Effect:
    both = before.keys() & after.keys()
    differences = [_seconds(after[key], until) - _seconds(before[key], until) for key in both]
    return Effect(
        name,
        _waiting(before.values(), until),
        _waiting(after.values(), until),
        gained=sum(difference < -SAME_SECONDS for difference in differences),
        lost=sum(difference > SAME_SECONDS for difference in differences),
        only_before=len(before) - len(both),
        only_after=len(after) - len(both),
        utilisation_before=share_before,
        utilisation_after=share_after,
    )


def _seconds(wait: Wait, until: int) -> float:
    return max(0, (until if wait.started_at is None else wait.started_at) - wait.from_at) / SECOND


def _waiting(waits: Iterable[Wait], until: int) -> Waiting:
    """Of those that could have started before the end."""
    counted = [wait for wait in waits if wait.from_at <= until]
    seconds = sorted(_seconds(wait, until) for wait in counted)
    if not seconds:
        return Waiting(0, 0, 0.0, 0.0, 0.0, 0.0)
    return Waiting(
        triggers=len(seconds),
        not_started=sum(wait.started_at is None for wait in counted),
        mean=sum(seconds) / len(seconds),
        p50=_quantile(seconds, 0.5),
        p95=_quantile(seconds, 0.95),
        max=seconds[-1],
    )


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _share(busy: int, places: int | None, length: int) -> float | None:
    if places == 0 or length == 0:
        return None
    return busy / length / (1 if places is None else places)


def _without_effect(change: Change, before: Run, after: Run) -> Iterable[str]:
    for agent_id in sorted(change.limits):
        if agent_id == EVERY_AGENT:
            continue
        if agent_id not in after.limits:
            yield f"the limit of {agent_id}: no such agent was there in that time"
        elif agent_id in after.serial:
            yield f"the limit of {agent_id}: it is serial, its limit is 1"
    yield from (
        f"the capacity of {site}: no such site was there in that time"
        for site in sorted(change.capacities)
        if site not in after.capacities
    )
    for gate in sorted(change.gates):
        site, scope, name = gate
        if site not in after.capacities:
            yield f"the gate of {scope} {name} at {site}: no such site was there in that time"
        elif gate not in before.gates | after.gates:
            yield f"the gate of {scope} {name} at {site}: nothing of it needed that site in that time"


def _unknown(traffic: Traffic, before: Run, after: Run) -> Iterable[Unknown]:
    """What the numbers rest on and nobody can know."""
    open_ones = sum(attempt.outcome == "open" for attempt in traffic.attempts.values())
    moved = sum(len(attempt.reactions) for attempt in traffic.attempts.values())
    stops = sum(isinstance(arrival.command, Stop) for arrival in traffic.arrivals)
    running, refused = len(traffic.running_at_start), len(before.refused | after.refused)
    found = [
        ("attempts ran when it began: they end when they did, whenever another policy had started them", running),
        ("attempts had not ended when the log did: they run on to the end", open_ones),
        ("attempts never ran, or not as often: they take the median of their agent", after.estimated),
        ("attempts were stopped from outside or had not ended: they would have gone on longer", after.cut_short),
        ("commands answered what had happened (a reply, a resume, a child): they come as long after it", moved),
        ("stops come at the time at which they came, whatever had become of the trigger", stops),
        ("requests were refused in the log or a run: what their senders did instead is not known", refused),
        *(
            (f"decisions are of policy {policy!r}, unknown to this version: its own rules decided instead", number)
            for policy, number in sorted(traffic.policies.items())
        ),
    ]
    return [Unknown(what, number) for what, number in found if number]
