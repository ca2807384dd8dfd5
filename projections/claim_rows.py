"""The claim of a trigger as its agent knows it, in the rows that readers see: pure.

A row is there from the first claim of a trigger to its end, also while it has none: how often grants came too late is
kept from one claim to the next. Claims as the sites know them are rows of their own (site_rows.py).
"""

from projections.row_sets import RowSets
from projections.row_types import AgentRow, ClaimState, DoesNotFit, TriggerClaimRow, TriggerRow
from streams.rules import events

NOT_ANSWERED = "site_not_answering"
"""The reason of a standing claim that its site has not answered in time."""


class TriggerClaims:
    """The claims of one agent, while a decision of it is applied. The agent's row counts them by state."""

    def __init__(self, rows: RowSets, agent: AgentRow, at: int) -> None:
        self._rows = rows
        self._agent = agent
        self._at = at

    def apply(
        self,
        trigger: TriggerRow,
        event: events.Claimed | events.ClaimGranted | events.ClaimWaiting | events.Returned,
    ) -> None:
        """The claim is made, answered or ended."""
        if isinstance(event, events.Claimed):
            self._claimed(trigger, event)
            return
        claim = self._rows.trigger_claims.get((trigger.agent_id, trigger.trigger_id))
        if claim is None or claim.state is None or claim.n != event.n:
            known = claim.n if claim is not None and claim.state is not None else None
            raise DoesNotFit(f"claim {event.n} of trigger {trigger.trigger_id!r} is {event.type}, and it has {known}")
        if claim.state not in ("asking", "standing") and not isinstance(event, events.Returned):
            raise DoesNotFit(f"claim {event.n} of trigger {trigger.trigger_id!r} is {event.type} after {claim.state}")
        match event:
            case events.ClaimGranted():
                self._move(claim, "held")
            case events.ClaimWaiting():
                self._move(claim, "standing")
                claim.reason = event.reason
            case events.Returned():
                claim.late += event.reason == "agent_parallelism_limit_reached"
                self._move(claim, None)
                claim.n = claim.asked_at = None

    def _claimed(self, trigger: TriggerRow, event: events.Claimed) -> None:
        key = trigger.agent_id, trigger.trigger_id
        claim = self._rows.trigger_claims.get(key)
        if claim is None:
            claim = TriggerClaimRow(*key, event.site, None, None, self._at, None, reserves=False)
            self._rows.trigger_claims[key] = claim
        if claim.state is not None:
            raise DoesNotFit(f"trigger {trigger.trigger_id!r} claims {event.n} while it has claim {claim.n}")
        claim.n, claim.asked_at = event.n, self._at
        claim.reserves = not (trigger.interactive and trigger.on_busy == "force")
        self._move(claim, "asking")

    def started(self, trigger: TriggerRow) -> None:
        """An attempt runs on the claim, if there is one."""
        claim = self._rows.trigger_claims.get((trigger.agent_id, trigger.trigger_id))
        if claim is None or claim.state is None:
            return
        if claim.state != "held":
            raise DoesNotFit(f"trigger {trigger.trigger_id!r} starts while its claim is {claim.state}")
        self._move(claim, "granted")

    def waits_again(self, trigger: TriggerRow) -> None:
        """A retry or a resumed one begins anew with being late."""
        claim = self._rows.trigger_claims.get((trigger.agent_id, trigger.trigger_id))
        if claim is not None:
            claim.late = 0

    def _move(self, claim: TriggerClaimRow, state: ClaimState | None) -> None:
        self._count(claim, -1)
        claim.state = state
        claim.since = self._at
        claim.reason = None
        self._count(claim, 1)

    def _count(self, claim: TriggerClaimRow, by: int) -> None:
        match claim.state:
            case "asking":
                self._agent.asking += by * claim.reserves
            case "standing":
                self._agent.standing += by
            case "held":
                self._agent.held += by
            case _:
                pass
