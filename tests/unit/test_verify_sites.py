"""``berth verify`` of sites: each kind of damage to the log of site decisions is found, where it is."""

import hashlib
import json
from collections.abc import Callable

import pytest

from streams import SITE_DECISIONS
from streams.audit.verify import Head, Violation
from streams.audit.verify_sites import SiteVerifier
from tests.driving import Driven, Json

Damage = Callable[[list[Json]], object]


def log() -> list[Json]:
    """Four decisions: the claims of t1 (granted), t2 (waits for its folder), t3 (waits for a worker), and t1's end."""
    driven = Driven(pool=1)
    driven.trigger("t1", "A1", worker=True, environment_id="e", folder="/a")
    driven.trigger("t2", "A2", environment_id="e", folder="/a/b")
    driven.trigger("t3", "A3", worker=True)
    driven.finish("t1", "A1")
    return [json.loads(output.value or b"") for output in driven.outputs if output.topic == SITE_DECISIONS.name]


def check(decisions: list[Json], chained: bool = True, heads: dict[str, Head] | None = None) -> Violation | None:
    """The first violation; ``chained``: with the digests that the damaged decisions have."""
    verifier = SiteVerifier(heads)
    prev = None
    for offset, decision in enumerate(decisions):
        if chained:
            decision["prev"] = prev
        value = json.dumps(decision, separators=(",", ":")).encode()
        prev = hashlib.sha256(value).hexdigest()
        violation = verifier.check(value, offset)
        if violation is not None:
            return violation
    return verifier.finish()


def grant(decisions: list[Json], number: int, agent_id: str, trigger_id: str) -> None:
    event = {"type": "claim_granted", "agent_id": agent_id, "trigger_id": trigger_id, "n": 1}
    decisions[number].setdefault("events", []).append(event)


DAMAGES: dict[str, tuple[Damage, str, int]] = {
    "an overlapping folder is granted": (lambda log: grant(log, 1, "A2", "t2"), "I2", 1),
    "one worker too many is granted": (lambda log: grant(log, 2, "A3", "t3"), "I3", 2),
    "a claim is granted twice": (lambda log: grant(log, 1, "A1", "t1"), "I4", 1),
    "one that never stood is granted": (lambda log: grant(log, 1, "A9", "t9"), "I4", 1),
    "a claim is opened twice": (lambda log: log[1]["events"].append(log[1]["events"][0]), "I4", 1),
    "a claim ends twice": (lambda log: log[3]["events"].append(log[3]["events"][0]), "I4", 3),
    "another number ends": (lambda log: log[3]["events"][0].update(n=2), "I4", 3),
    "one is left out": (lambda log: log.pop(1), "seq", 1),
    "unreadable": (lambda log: log[1].update(seq="x"), "unreadable", 1),
}


def test_a_sound_log_of_a_site_is_verified() -> None:
    decisions = log()
    assert len(decisions) == 4
    assert check(decisions, chained=False) is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_a_sites_log_is_found_where_it_is(damage: str) -> None:
    """I2, I3, I4 and the chain."""
    change, kind, offset = DAMAGES[damage]
    decisions = log()
    change(decisions)
    violation = check(decisions)
    assert violation is not None
    assert (violation.kind, violation.offset) == (kind, offset)


def test_a_changed_decision_breaks_the_chain_at_the_next_one() -> None:
    decisions = log()
    decisions[1]["via"] = "kafka"
    violation = check(decisions, chained=False)
    assert violation is not None
    assert (violation.kind, violation.offset, violation.decider) == ("chain", 2, "default")


def test_a_tail_that_was_cut_off_is_missed() -> None:
    decisions = log()
    violation = check(decisions[:-1], chained=False, heads={"default": Head(4, None)})
    assert violation is not None
    assert (violation.kind, violation.seq) == ("tail", 3)
