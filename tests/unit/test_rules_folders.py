"""D2-D5: folders by segment, never two attempts in overlapping ones, nobody passed for ever, deletions."""

import random

import pytest

from streams.rules import events, limits, site_events
from streams.rules.folders import FolderInvalid, overlap, path_of, segments
from tests.driving import Driven, Json, at_seconds

POOL: Json = {"worker": True}
PERSON: Json = {"interactive": True, "kind": "chat"}


def place(path: str | None, environment_id: str = "e") -> Json:
    return {"environment_id": environment_id, **({} if path is None else {"folder": path})}


def both(one: str | None, other: str | None, environment_id: str = "e") -> bool:
    """Whether two agents may run in these folders at once; if not, the second starts when the first ends."""
    driven = Driven()
    driven.trigger("t1", "A1", **place(one))
    driven.trigger("t2", "A2", **place(other, environment_id))
    assert driven.running("A1") == ["t1"]
    together = driven.running("A2") == ["t2"]
    if not together:
        [event] = driven.events_of(events.ClaimWaiting)
        assert event.reason == "agent_environment_folder_busy"
    driven.finish("t1", "A1")
    assert driven.running("A2") == ["t2"]
    driven.check()
    return together


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("/srv/project", "/srv/projects", True),
        ("/srv/project", "/srv/project-x", True),
        ("/srv/project", "/srv/project.bak", True),
        ("/srv/project", "/srv/project/src", False),
        ("/srv/project", "/srv", False),
        ("/a/b", "/a/bc", True),
        ("/a/b", "/a/b", False),
        ("/a/b", "/a/c", True),
        ("/a/b", "/a/b/c/d/e", False),
        ("/a/b/c/d/e", "/a", False),
        ("/a_b", "/axb", True),
        ("/a%", "/a%2f", True),
        ("/", "/anything/at/all", False),
        (None, "/x", False),
        (None, None, False),
        ("/x", None, False),
    ],
)
def test_folders_overlap_by_segment(one: str | None, other: str | None, together: bool) -> None:
    """D2, case 76: same, above or below; "/" and no folder are the whole environment."""
    assert both(one, other) is together
    assert both(other, one) is together


@pytest.mark.parametrize("spelling", ["/a/b", "/a/b/", "/a/b//", "/a//b", "///a///b///"])
def test_the_spelling_with_slashes_makes_no_second_folder(spelling: str) -> None:
    """D2, case 78: one compared form, and the runner gets what was sent."""
    assert not both("/a/b", spelling)
    driven = Driven()
    driven.trigger("t1", **place(spelling))
    assert driven.dispatch("t1")["folder"] == spelling
    [opened] = [e for d in driven.site_decisions for e in d.events if isinstance(e, site_events.ClaimOpened)]
    assert opened.path == "/a/b"


@pytest.mark.parametrize(
    "path", ["proj", "./proj", ".", "~", "~/x", " /a/b", "/a/./b", "/a/../b", "/..", "/a\u0085b", "/" + "a/" * 65,
             "/" + "é" * 2048, "a\\b"]
)  # fmt: skip
def test_what_names_no_folder_is_refused_on_every_door(path: str) -> None:
    """D2, case 86: relative ones, dots, controls, too long and too deep; nothing half done."""
    with pytest.raises(FolderInvalid):
        segments(path)
    driven = Driven()
    refusal = driven.trigger("t1", **place(path)).refusal
    assert refusal is not None
    assert refusal.code == "invalid_record"
    assert not driven.messages
    assert not driven.agent().triggers
    driven.configure("B", default_environment_id="e", default_folder="/ok")
    assert driven.trigger("t2", "B", environment_id="e", folder=path).refusal is not None
    before = driven.state()
    decision = driven.configure("B", default_folder=path)
    assert decision.refusal is not None
    assert decision.refusal.code == "invalid_record"
    assert driven.state() == before
    driven.site_control("configure_site", capacity=1)
    gone = driven.site_control("delete_folder", environment_id="e", path=path)
    assert gone.refusal is not None
    assert gone.refusal.code == "invalid_record"
    driven.check()


@pytest.mark.parametrize(
    ("one", "other"),
    [("/Srv/Repo", "/srv/repo"), ("/a\\b", "/a/b"), ("/a%2eb", "/a.b"), ("/a b", "/ab"), ("/a ", "/a"), ("/a", "/á")],
)
def test_case_backslashes_percent_and_spaces_are_ordinary(one: str, other: str) -> None:
    """D2, case 80: POSIX rules."""
    assert both(one, other)


def test_composed_and_decomposed_letters_are_the_same_folder() -> None:
    """D2: NFC."""
    assert not both("/caf\u00e9", "/cafe\u0301")


def test_other_environments_and_sites_are_other_folders() -> None:
    """D2: (site, environment, path)."""
    assert both("/a", "/a", "other")
    driven = Driven()
    driven.site_control("configure_site", "far", capacity=0)
    driven.trigger("t1", "A1", **place("/a"))
    driven.trigger("t2", "A2", **place("/a"), site="far")
    assert (driven.running("A1"), driven.running("A2")) == (["t1"], ["t2"])


@pytest.mark.parametrize("seed", range(20))
def test_overlap_is_that_of_the_segment_lists(seed: int) -> None:
    """D2: against the definition, on random paths of few names."""
    chance = random.Random(seed)
    for _ in range(200):
        one, other = (["a" * chance.randrange(1, 4) for _ in range(chance.randrange(4))] for _ in range(2))
        expected = all(x == y for x, y in zip(one, other, strict=False))
        mine, theirs = segments("/" + "//".join(one)), segments("/" + "/".join(other) + "/" * chance.randrange(3))
        assert overlap(mine, theirs) is overlap(theirs, mine) is expected
        assert segments(path_of(mine)) == mine


@pytest.mark.parametrize(("one", "other"), [("/repo", "/repo"), ("/repo", "/repo/sub"), ("/repo/sub", "/repo")])
def test_of_two_agents_asking_at_once_exactly_one_runs(one: str, other: str) -> None:
    """D3, case 82: 200 times, in either order of their messages."""
    for number in range(200):
        driven = Driven(delivers=False, verified=False)
        driven.trigger("t1", "A1", **place(one))
        driven.trigger("t2", "A2", **place(other))
        if number % 2:
            driven.undelivered.reverse()
        driven.delivers = True
        driven.deliver()
        driven.trigger("nothing", "B")
        running = [agent_id for agent_id in ("A1", "A2") if driven.running(agent_id)]
        assert len(running) == 1
        driven.finish(driven.running(running[0])[0], running[0])
        assert [agent_id for agent_id in ("A1", "A2") if driven.running(agent_id)] == [
            {"A1": "A2", "A2": "A1"}[running[0]]
        ]


def test_also_the_same_agent_has_a_folder_once() -> None:
    """D3."""
    driven = Driven("unlimited")
    driven.trigger("t1", **place("/a"))
    driven.trigger("t2", **place("/a/b"))
    driven.trigger("t3", **place("/b"))
    assert driven.running() == ["t1", "t3"], "who is blocked holds up nobody (C3, D4)"
    driven.check()


def test_a_wide_claim_is_passed_a_bounded_number_of_times_and_siblings_go_on() -> None:
    """D4, case 84: children of an endless stream pass it B times; then they wait behind it."""
    driven = Driven()
    driven.trigger("holder", "H", **place("/a/1"))
    driven.advance(1)
    driven.trigger("wide", "W", **place("/a"))
    started = []
    for number in range(2, 30):
        driven.advance(1)
        driven.trigger(f"t{number}", f"A{number}", **place(f"/a/{number}"))
        driven.trigger(f"s{number}", f"S{number}", **place(f"/sibling/{number}"))
        started += driven.running(f"A{number}")
        assert driven.running(f"S{number}") == [f"s{number}"]
        for done in started[:-2]:
            agent_id = "A" + done[1:]
            if driven.running(agent_id):
                driven.finish(done, agent_id)
    assert started == [f"t{number}" for number in range(2, 2 + limits.CLAIM_PASSES_MAX)]
    driven.finish("holder", "H")
    for done in started:
        if driven.running("A" + done[1:]):
            driven.finish(done, "A" + done[1:])
    assert driven.running("W") == ["wide"]
    driven.finish("wide", "W")
    assert all(driven.running(f"A{number}") == [f"t{number}"] for number in range(7, 30))
    driven.check()


def test_only_the_oldest_that_is_passed_is_counted() -> None:
    """[a]: one grant changes one other claim."""
    driven = Driven()
    driven.trigger("holder", "H", **place("/a/1"))
    for number in range(1, 4):
        driven.advance(1)
        driven.trigger(f"wide{number}", f"W{number}", **place("/a"))
    driven.advance(1)
    driven.trigger("child", "C", **place("/a/2"))
    passed = {claim.trigger_id: claim.passed for claim in driven.site().claims.values()}
    assert passed == {"holder": 0, "wide1": 1, "wide2": 0, "wide3": 0, "child": 0}
    driven.check()


def test_a_gated_wide_claim_neither_counts_nor_blocks() -> None:
    """[a], why(3): it could not start anyhow."""
    driven = Driven()
    driven.trigger("holder", "H", **place("/a/1"))
    driven.advance(1)
    driven.trigger("wide", "W", **place("/a"), organization_id="o")
    driven.advance(1)
    for number in range(2, 9):
        driven.trigger(f"t{number}", f"A{number}", **place(f"/a/{number}"))
    assert driven.claim_state("t8", "A8") == "standing"
    driven.site_control("gate", scope="organization", name="o", enabled=False)
    assert driven.running("A8") == ["t8"]
    driven.site_control("gate", scope="organization", name="o", enabled=True)
    driven.trigger("t9", "A9", **place("/a/9"))
    assert driven.claim_state("t9", "A9") == "standing", "it blocks again"
    driven.check()


# D5


@pytest.mark.parametrize("what", ["folder", "parent", "environment"])
def test_who_was_accepted_before_a_deletion_goes_on_without_its_folder(what: str) -> None:
    """D5: the running one goes on, the waiting ones lose it and stay in the queue; later ones have it."""
    driven = Driven()
    driven.trigger("t1", "A1", **place("/a/b"))
    driven.trigger("t2", "A2", **place("/a/b"))
    driven.trigger("other", "O", **place("/c"))
    driven.advance(1)
    if what == "environment":
        driven.site_control("delete_environment", environment_id="e")
    else:
        driven.site_control("delete_folder", environment_id="e", path="/a//b/" if what == "folder" else "/a")
    assert (driven.running("A1"), driven.running("A2")) == (["t1"], ["t2"])
    assert (driven.dispatch("t2", "A2")["degraded"], driven.dispatch("t2", "A2").get("folder")) == (True, "/a/b")
    assert driven.dispatch("t1", "A1").get("degraded", False) is False
    driven.advance(1)
    driven.trigger("t3", "A3", **place("/a/b"))
    assert driven.claim_state("t3", "A3") == "standing", "a new one takes part as before"
    driven.finish("t1", "A1")
    assert driven.dispatch("t3", "A3").get("degraded", False) is False
    driven.crash()
    driven.check()


def test_a_retry_of_one_accepted_before_the_deletion_is_degraded_too() -> None:
    """D5: by its acceptance, not by its claim."""
    driven = Driven()
    driven.trigger("t1", **place("/a"))
    driven.site_control("delete_folder", environment_id="e", path="/a")
    driven.fail("t1")
    driven.advance(5)
    assert driven.dispatch("t1")["attempt"] == 2
    assert driven.dispatch("t1")["degraded"] is True
    driven.check()


def test_deleting_a_folder_leaves_its_siblings_and_parents_alone() -> None:
    """D5, D2: by segment."""
    driven = Driven()
    driven.trigger("holder", "H", **place("/"))
    for number, path in enumerate(["/a/bc", "/a", "/a/b/c"]):
        driven.trigger(f"t{number}", f"A{number}", **place(path))
    driven.advance(1)
    driven.site_control("delete_folder", environment_id="e", path="/a/b")
    assert [bool(driven.running(f"A{number}")) for number in range(3)] == [False, False, True]
    driven.check()


# A4: the agent's environment


def test_a_trigger_takes_the_agents_environment_and_folder_at_its_acceptance() -> None:
    """A4: stamped; a later change of the agent doesn't touch it."""
    driven = Driven()
    driven.configure(default_environment_id="e", default_folder="/home")
    driven.trigger("t1")
    driven.trigger("t2")
    driven.trigger("t3", environment_id="f", folder="/own")
    driven.trigger("t4", folder="/own")
    driven.configure(default_environment_id="other", default_folder="/moved")
    driven.crash()
    found = []
    for id in ("t1", "t2", "t3", "t4"):
        dispatch = driven.dispatch(id)
        found.append((dispatch["environment_id"], dispatch.get("folder")))
        driven.finish(id)
    assert found == [("e", "/home"), ("e", "/home"), ("f", "/own"), ("e", "/own")]
    driven.check()


def test_a_serial_agent_with_an_environment_waits_for_its_folder_without_losing_others() -> None:
    """A4, D6: nobody else's slot is involved."""
    driven = Driven()
    driven.configure(default_environment_id="e")
    driven.trigger("t1", "B", environment_id="e", folder="/x", created_at=at_seconds(-1))
    driven.trigger("t2")
    assert driven.claim_state("t2") == "standing"
    assert driven.trigger("f", **PERSON, on_busy="force").refusal is None
    assert driven.refused()["f"] == "agent_environment_folder_busy"
    driven.finish("t1", "B")
    assert driven.running() == ["t2"]
    driven.check()
