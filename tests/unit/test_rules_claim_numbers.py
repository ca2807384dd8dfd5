"""Z1 of the site protocol: of one trigger's claims the one with the highest number counts, whatever was lost before."""

import pytest

from streams.rules import site_events
from streams.rules.site.rows import ClaimId
from tests.driving import Driven
from tests.unit.test_rules_sites import POOL, command_of, deliver_all


def test_an_older_claim_of_a_trigger_that_comes_again_is_stale() -> None:
    """Z1: numbers only grow; the present claim, its order and its worker stay as they are."""
    driven = Driven(pool=1)
    driven.trigger("t1", **POOL)
    [first] = [record for record in driven.input if record.topic == "berth.claims"]
    driven.fail("t1")
    driven.advance(60)
    before = driven.state()
    driven.again(first)
    ignored = driven.site_decisions[-1].ignored
    assert ignored is not None
    assert ignored.reason == "stale"
    assert driven.state() == before
    assert (driven.running(), driven.site().claims[ClaimId("A", "t1")].n) == (["t1"], 2)
    driven.check()


@pytest.mark.parametrize("granted", [True, False])
def test_a_newer_claim_ends_the_one_whose_release_never_came(granted: bool) -> None:
    """Z1: in one decision; what was granted counts as used, and others are let in as ever."""
    driven = Driven(pool=1, delivers=False)
    driven.site_control("gate", scope="organization", name="o", run_budget=7)
    if not granted:
        driven.trigger("busy", "B", **POOL)
        deliver_all(driven)
    driven.trigger("t1", **POOL, organization_id="o")
    driven.deliver()
    driven.control("pause")
    driven.control("resume")
    driven.undelivered = [output for output in driven.undelivered if command_of(output) == ("claim", 2)]
    deliver_all(driven)
    [closed] = [e for d in driven.site_decisions for e in d.events if isinstance(e, site_events.ClaimClosed)]
    assert (closed.n, closed.started) == (1, granted)
    assert driven.site().claims[ClaimId("A", "t1")].n == 2
    assert driven.running() == (["t1"] if granted else [])
    assert driven.site().gates["organization", "o"].run_budget == (5 if granted else 7)
    driven.check()
