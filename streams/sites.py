"""The sites of one partition: their rows, their decisions, and what they tell agents.

The half of ``Partition`` that has to do with sites, apart because it shares nothing with that of the agents but the
transaction. A decision of a site goes to berth.site-decisions, its answers go to berth.signals.
"""

import hashlib
from collections.abc import Iterator
from typing import Final

from pydantic import TypeAdapter

from streams import SITE_DECISIONS, codec
from streams.codec import Output
from streams.rules import limits, verdicts
from streams.rules.agent.rows import RememberedRow
from streams.rules.agent.step import Via
from streams.rules.site.decide import SiteStep, decide
from streams.rules.site.rows import ClaimId, ClaimRow, DeletionRow, GateRow, SiteRow
from streams.rules.site.state import Site, SiteRowRef
from streams.rules.site_events import SiteCommand, SiteDecision, write_site_decision
from streams.rules.site_messages import ContinueSite, InvalidSite, SiteControl

_SITE: Final = TypeAdapter(SiteRow)
_GATE: Final = TypeAdapter(GateRow)
_DELETION: Final = TypeAdapter(DeletionRow)
_CLAIM: Final = TypeAdapter(ClaimRow)
_REMEMBERED: Final = TypeAdapter(RememberedRow)


class Sites:
    """Every site of a partition, by id. Instants are microseconds."""

    def __init__(self, defaults: limits.Defaults, partitions: int) -> None:
        self.sites: dict[str, Site] = {}
        self.working_on: str | None = None
        """The site that is being decided, for whoever must say where the rules failed."""
        self._defaults = defaults
        self._partitions = partitions
        self._unfinished: dict[str, None] = {}
        self._outputs: list[Output] = []
        self._changed: dict[str, Site] = {}
        self._loading: list[tuple[str, ClaimRow]] = []

    # Rows

    def load_row(self, key: codec.Key, value: bytes) -> None:
        """One stored row; ``loaded`` when all are there."""
        match key:
            case ("site", site_id):
                self._site(site_id).row = _SITE.validate_json(value)
            case ("gate", site_id, "organization" | "department" as scope, name):
                self._site(site_id).gates[scope, name] = _GATE.validate_json(value)
            case ("deletion", site_id, environment_id, path):
                self._site(site_id).deletions[environment_id, path] = _DELETION.validate_json(value)
            case ("claim", site_id, _, _):
                self._loading.append((site_id, _CLAIM.validate_json(value)))
            case ("site_control", site_id, id):
                self._site(site_id).remembered[id] = _REMEMBERED.validate_json(value)
            case _:
                raise ValueError(f"the changelog holds a row of a site of an unknown kind: {key}")

    def loaded(self) -> None:
        """Claims enter the indexes only now, when capacity and gates are known."""
        for site_id, claim in self._loading:
            self._site(site_id).enter(claim)
        self._loading.clear()
        for site in self.sites.values():
            site.remembered = dict(sorted(site.remembered.items(), key=lambda item: (item[1].at, item[1].seq)))
            site.changed.clear()
            self._note(site)

    def take_outputs(self) -> list[Output]:
        """Records since the last time; which rows changed is forgotten."""
        outputs, self._outputs = self._outputs, []
        for site in self._changed.values():
            site.changed.clear()
        self._changed = {}
        return outputs

    def take(self) -> tuple[list[Output], dict[bytes, bytes | None]]:
        """Records and rows since the last time."""
        outputs, self._outputs = self._outputs, []
        rows = {
            codec.write_key(_row_key(site.site_id, ref)): _row_value(site, ref)
            for site in self._changed.values()
            for ref in site.changed
        }
        for site in self._changed.values():
            site.changed.clear()
        self._changed = {}
        return outputs, rows

    def _site(self, site_id: str) -> Site:
        site = self.sites.get(site_id)
        if site is None:
            site = self.sites[site_id] = Site(site_id)
        return site

    # Deciding

    @property
    def has_work(self) -> bool:
        """Whether an earlier step left something over."""
        return bool(self._unfinished)

    def handle(self, site_id: str, command: SiteCommand, cause: verdicts.Cause, via: Via, at: int) -> int:
        """Decide one command; the instant of the decision, 0 if it left none."""
        self.working_on = site_id
        site = self._site(site_id)
        was_left_over = site.row.todo_since is not None
        step = decide(site, command, at, self._defaults)
        if step.has_decision:
            self._write(site, step, cause, via)
        elif step.more or was_left_over:
            site.changed[SiteRowRef("site")] = None  # how far a walk has come, or that nothing is left
        self._changed[site_id] = site
        self._note(site)
        return at if step.has_decision else 0

    def work_off(self, at: int) -> int:
        """One step of what is left over; the instant of its decision, 0 if it left none."""
        site = self.sites[next(iter(self._unfinished))]
        cause = verdicts.ContinueCause(**{"continue": site.row.todo_since or site.row.seq})
        return self.handle(site.site_id, ContinueSite(), cause, "internal", at)

    def _note(self, site: Site) -> None:
        if site.row.todo or site.row.todo_grant:
            self._unfinished[site.site_id] = None
        else:
            self._unfinished.pop(site.site_id, None)

    def _write(self, site: Site, step: SiteStep, cause: verdicts.Cause, via: Via) -> None:
        decision = site_decision_of(site, step, cause, via)
        value = write_site_decision(decision)
        site.row.prev = hashlib.sha256(value).hexdigest()
        headers = codec.decision_headers(decision.command_id, decision.settles)
        self._outputs.append(Output(SITE_DECISIONS.name, site.site_id.encode(), value, headers))
        self._outputs.extend(codec.write_message(message, self._partitions) for message in step.outputs)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites.values())


def site_decision_of(site: Site, step: SiteStep, cause: verdicts.Cause, via: Via) -> SiteDecision:
    """What is written of a step that has just been decided."""
    command = step.command
    if step.repeats is not None:
        command = command.model_copy(update={"repeats": step.repeats})
    command_id = command.id if isinstance(command, SiteControl | InvalidSite) else None
    return SiteDecision(
        site=site.site_id,
        seq=step.seq,
        at=step.at,
        via=via,
        cause=cause,
        command=command,
        command_id=command_id,
        settles=() if command_id is None else (command_id,),
        events=tuple(step.emitted),
        refusal=step.refusal,
        ignored=step.ignored,
        policy=limits.POLICY,
        prev=site.row.prev,
    )


def read_site(value: bytes) -> SiteRow:
    """A site's header row."""
    return _SITE.validate_json(value)


def rows_of(site: Site, with_remembered: bool = True) -> dict[bytes, bytes]:
    """All of a site's rows, as they would be stored. ``with_remembered``: the ids of its controls among them."""
    refs = [SiteRowRef("site"), *(SiteRowRef("gate", gate) for gate in site.gates)]
    refs += [SiteRowRef("deletion", deletion) for deletion in site.deletions]
    refs += [SiteRowRef("claim", claim) for claim in site.claims]
    refs += [SiteRowRef("remembered", (id,)) for id in site.remembered] if with_remembered else []
    rows = {codec.write_key(_row_key(site.site_id, ref)): _row_value(site, ref) for ref in refs}
    return {key: value for key, value in rows.items() if value is not None}


def _row_key(site_id: str, ref: SiteRowRef) -> codec.Key:
    kind = "site_control" if ref.kind == "remembered" else ref.kind
    return (kind, site_id, *ref.id)


def _row_value(site: Site, ref: SiteRowRef) -> bytes | None:
    match ref:
        case SiteRowRef("site"):
            return _SITE.dump_json(site.row, exclude_defaults=True, warnings="error")
        case SiteRowRef("gate", (("organization" | "department") as scope, name)):
            return _GATE.dump_json(site.gates[scope, name], exclude_defaults=True, warnings="error")
        case SiteRowRef("deletion", (environment_id, path)):
            return _DELETION.dump_json(site.deletions[environment_id, path], warnings="error")
        case SiteRowRef("claim", (agent_id, trigger_id)):
            claim = site.claims.get(ClaimId(agent_id, trigger_id))
            return None if claim is None else _CLAIM.dump_json(claim, exclude_defaults=True, warnings="error")
        case SiteRowRef("remembered", (id,)):
            remembered = site.remembered.get(id)
            return None if remembered is None else _REMEMBERED.dump_json(remembered, warnings="error")
        case _:
            raise ValueError(f"a site has no row {ref}")
