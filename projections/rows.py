"""What a decision changes in the rows that readers see: pure, one decision after the other.

    named = Named()                 # which rows the decisions of a batch read or change,
    named.add(decision)             # for each of them; those that are stored are put into
    rows = Rows()                   # rows.agents and the other tables; then, in order,
    rows.apply(topic, partition, offset, decision, value)
                                    # and what is named is to be written, whole, or deleted.

Instants are microseconds. A decision is applied once, in order: the caller moves its position in the same transaction.
An event that doesn't fit the rows (an attempt that ends twice, a final trigger that runs again, a number left out) is
corruption or a bug, and raises CannotApply: a projection that guessed would be wrong for ever after, and nobody would
see it.

Agents and sites are decided apart and applied apart: no event of one looks at rows of the other.
"""

from typing import Final, TypedDict

from projections.agent_rows import AgentStep
from projections.row_sets import Named, RowSets
from projections.row_types import (
    AgentRow,
    CannotApply,
    DecisionIdRow,
    DecisionRow,
    DoesNotFit,
    SiteDecisionRow,
    SiteRow,
)
from projections.site_rows import SiteStep
from projections.texts import clean_json
from streams.rules import events
from streams.rules.messages import Approve, Reschedule, ResumeTrigger, Stop, Timer
from streams.rules.site_events import SiteDecision

__all__: Final = ("Named", "Rows")


class Rows(RowSets):
    """The rows of a batch, and how decisions change them."""

    def apply(
        self, topic: str, partition: int, offset: int, decision: events.Decision | SiteDecision, value: bytes
    ) -> None:
        """Apply the decision that a record of the log holds, after those before it. CannotApply if it doesn't fit."""
        try:
            if isinstance(decision, SiteDecision):
                self._apply_of_site(partition, offset, decision, value)
            else:
                self._apply(partition, offset, decision, value)
        except DoesNotFit as why:
            raise CannotApply(topic, partition, offset, str(why)) from why

    def _apply(self, partition: int, offset: int, decision: events.Decision, value: bytes) -> None:
        agent = self.agents.get(decision.agent_id)
        if agent is None:
            agent = self.agents[decision.agent_id] = AgentRow(decision.agent_id, partition, 0, decision.at)
        _check_follows(f"agent {agent.agent_id!r}", agent, partition, decision.seq)
        step = AgentStep(self, agent, decision)
        for event in decision.events:
            step.apply(event)
        agent.seq = decision.seq
        agent.decided_at = decision.at
        if decision.refusal is not None:
            agent.refused += 1
        if decision.ignored is not None:
            agent.ignored += 1
        self.decisions.append(DecisionRow(decision.agent_id, **_of_log(decision, partition, offset, value)))
        self.decision_ids.extend(DecisionIdRow(decision.agent_id, id, decision.seq) for id in _ids_of(decision))

    def _apply_of_site(self, partition: int, offset: int, decision: SiteDecision, value: bytes) -> None:
        site = self.sites.get(decision.site)
        if site is None:
            site = self.sites[decision.site] = SiteRow(decision.site, partition, 0, decision.at)
        _check_follows(f"site {site.site!r}", site, partition, decision.seq)
        step = SiteStep(self, site, decision)
        for event in decision.events:
            step.apply(event)
        site.seq = decision.seq
        site.decided_at = decision.at
        self.site_decisions.append(SiteDecisionRow(decision.site, **_of_log(decision, partition, offset, value)))


def _check_follows(who: str, row: AgentRow | SiteRow, partition: int, seq: int) -> None:
    if row.log_partition != partition:
        raise DoesNotFit(
            f"{who} has decisions in partition {row.log_partition}: the number of partitions "
            "was changed, or the record was written by something else than a worker"
        )
    if seq != row.seq + 1:
        raise DoesNotFit(f"{who} is at decision {row.seq}, and this is {seq}")


class _OfLog(TypedDict):
    """The columns that decisions of agents and of sites share."""

    seq: int
    decided_at: int
    log_partition: int
    log_offset: int
    command_type: str
    command_id: str | None
    settles: list[str]
    refusal_code: str | None
    ignored_reason: str | None
    record: str


def _of_log(decision: events.Decision | SiteDecision, partition: int, offset: int, value: bytes) -> _OfLog:
    return _OfLog(
        seq=decision.seq,
        decided_at=decision.at,
        log_partition=partition,
        log_offset=offset,
        command_type=decision.command.type,
        command_id=decision.command_id,
        settles=list(decision.settles),
        refusal_code=decision.refusal.code if decision.refusal else None,
        ignored_reason=decision.ignored.reason if decision.ignored else None,
        record=clean_json(value),
    )


def _ids_of(decision: events.Decision) -> set[str]:
    """Ids under which somebody looks for the decision: its commands, and the triggers that it is about."""
    ids = set(decision.settles)
    if decision.command_id is not None:
        ids.add(decision.command_id)
    command = decision.command
    if isinstance(command, Stop | Approve | Reschedule | ResumeTrigger):
        if command.trigger_id is not None:
            ids.add(command.trigger_id)
    elif isinstance(command, Timer) and command.id:
        ids.add(command.id)
    for event in decision.events:
        trigger_id = getattr(event, "trigger_id", None)
        if trigger_id is not None and not isinstance(event, events.OF_OTHERS):
            ids.add(trigger_id)
    return ids
