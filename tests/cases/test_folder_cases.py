"""Public bug reports that must not be repeated: shared folders, and what becomes of them with their holders.

Each docstring begins with the number of the case in the list of cases; the scenario is its own.
"""

import pytest

from tests.driving import Driven, Json


def in_folder(path: str | None, environment_id: str = "e") -> Json:
    return {"environment_id": environment_id, **({} if path is None else {"folder": path})}


def test_an_archived_and_revived_agent_starts_with_its_folders_free() -> None:
    """Case 12: archive takes the place of deletion; who waited for its folders starts."""
    driven = Driven("unlimited")
    for number in range(3):
        driven.trigger(f"c{number}", **in_folder(f"/home/{number}"))
    driven.trigger("other", "B", **in_folder("/home"))
    driven.control("archive")
    for number in range(3):
        driven.status(f"c{number}", "stopped")
    assert driven.running("B") == ["other"]
    driven.finish("other", "B")
    driven.configure()
    driven.trigger("again", **in_folder("/home/1"))
    assert (driven.running(), driven.granted()) == (["again"], ["again"])
    driven.check()


def test_a_dead_workers_slot_and_folder_go_free_together() -> None:
    """Case 14: at the end of the attempt's own lease, for its own agent's next and for another agent's."""
    driven = Driven()
    driven.trigger("c1", timeout_seconds=60, max_attempts=1, **in_folder("/repo"))
    driven.trigger("c2")
    driven.trigger("d1", "B", **in_folder("/repo/sub"))
    driven.advance(359)
    assert (driven.running(), driven.running("B")) == (["c1"], [])
    driven.advance(1)
    assert (driven.running(), driven.running("B")) == (["c2"], ["d1"])
    driven.check()


def test_a_retry_keeps_its_folder_when_the_agents_default_moves() -> None:
    """Case 59: agent, folder and requester are those of its acceptance, and it excludes others from that folder."""
    driven = Driven()
    driven.configure(default_environment_id="e", default_folder="/p")
    driven.trigger("c1", requested_by="u1")
    driven.fail("c1")
    driven.configure(default_folder="/q")
    driven.advance(5)
    again = driven.dispatch("c1")
    assert (again["attempt"], again["folder"], again["agent_id"]) == (2, "/p", "A")
    assert driven.agent().triggers["c1"].requested_by == "u1"
    driven.trigger("other", "B", **in_folder("/p/sub"))
    driven.trigger("moved", "C", **in_folder("/q"))
    assert (driven.running("B"), driven.running("C")) == ([], ["moved"])
    driven.check()


@pytest.mark.parametrize("restart", [False, True])
def test_siblings_that_share_the_beginning_of_a_name_are_no_children(restart: bool) -> None:
    """Case 76: the same answer after a replay."""
    driven = Driven("unlimited")
    driven.trigger("holder", "H", **in_folder("/srv/project"))
    for number, name in enumerate(["projects", "project-x", "project.bak", "project_", "project%"]):
        driven.trigger(f"sibling{number}", **in_folder(f"/srv/{name}"))
    driven.trigger("child", "B", **in_folder("/srv/project/src"))
    driven.trigger("parent", "C", **in_folder("/srv"))
    if restart:
        driven.crash()
    assert len(driven.running()) == 5
    assert (driven.running("B"), driven.running("C")) == ([], [])
    driven.finish("holder", "H")
    assert driven.running("B") == ["child"]
    driven.check()


@pytest.mark.parametrize("spelling", ["/a/b/", "/a/b//", "/a//b", "//a/b"])
def test_slashes_make_no_second_name_of_a_folder(spelling: str) -> None:
    """Case 78: on both sides."""
    for one, other in (("/a/b", spelling), (spelling, "/a/b")):
        driven = Driven()
        driven.trigger("c1", **in_folder(one))
        driven.trigger("c2", "B", **in_folder(other))
        assert driven.running("B") == []
        assert {claim.path for claim in driven.site().claims.values()} == {"/a/b"}


@pytest.mark.parametrize("path", ["/a/./b", " /a/b", "proj", "./proj", "", ".", "~", "/w/../proj", 5, ["/a"]])
def test_what_is_no_absolute_name_is_refused_and_holds_nothing(path: object) -> None:
    """Cases 78 and 86: by one rule, on the trigger and on the agent's default; nothing is resolved or guessed."""
    driven = Driven()
    driven.configure("B", default_environment_id="e")
    for decision in (driven.trigger("c1", environment_id="e", folder=path), driven.configure("B", default_folder=path)):
        assert decision.refusal is not None
        assert decision.refusal.code == "invalid_record"
    driven.trigger("c2", **in_folder("/"))
    assert driven.running() == ["c2"]
    driven.check()


def test_case_makes_two_folders_of_a_name() -> None:
    """Case 80: POSIX, in the claim as in the agents."""
    driven = Driven()
    driven.trigger("c1", **in_folder("/W/Repo"))
    driven.trigger("c2", "B", **in_folder("/w/repo"))
    assert (driven.running(), driven.running("B")) == (["c1"], ["c2"])


@pytest.mark.parametrize("second", ["/repo", "/repo/sub", "/"])
def test_two_agents_that_claim_a_folder_at_once_take_turns(second: str) -> None:
    """Case 82: every order in which their claims may come, and a restart between any two messages."""
    for crash_after in range(7):
        for reverse in (False, True):
            driven = Driven(delivers=False)
            driven.trigger("c1", "A1", **in_folder("/repo"))
            driven.trigger("c2", "A2", **in_folder(second))
            if reverse:
                driven.undelivered.reverse()
            for number in range(20):
                if number == crash_after:
                    driven.crash()
                if not driven.undelivered:
                    break
                driven.deliver()
            [first] = [agent_id for agent_id in ("A1", "A2") if driven.running(agent_id)]
            driven.delivers = True
            driven.finish(driven.running(first)[0], first)
            assert not driven.running(first)
            assert driven.running("A2" if first == "A1" else "A1")
            driven.check()


def test_a_wide_claim_does_not_starve_behind_a_stream_of_small_ones() -> None:
    """Case 84: one comes each second and runs for ten; a bounded number of younger ones may pass."""
    driven = Driven()
    driven.trigger("first", "A1", **in_folder("/a/1"))
    driven.advance(1)
    driven.trigger("wide", "A2", **in_folder("/a"))
    for second in range(2, 60):
        driven.advance(1)
        driven.trigger("small", f"S{second}", **in_folder(f"/a/{second}"))
        if second >= 12 and driven.running(f"S{second - 10}"):
            driven.finish("small", f"S{second - 10}")
    passed = [second for second in range(2, 60) if driven.dispatched(f"S{second}")]
    assert passed == [2, 3, 4, 5, 6]
    assert driven.running("A2") == []
    driven.finish("first", "A1")
    assert driven.running("A2") == ["wide"]
    driven.finish("wide", "A2")
    assert all(driven.dispatched(f"S{second}") for second in range(2, 60))
    driven.check()


@pytest.mark.parametrize("path", [None, "/"])
def test_the_root_excludes_every_other_folder_of_its_environment(path: str | None) -> None:
    """Case 86."""
    driven = Driven()
    driven.trigger("c1", **in_folder(path))
    driven.trigger("c2", "B", **in_folder("/anything"))
    driven.trigger("c3", "C", **in_folder("/anything", "other"))
    assert (driven.running("B"), driven.running("C")) == ([], ["c3"])


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_held_folders_and_workers_are_still_held_after_a_restart(limit: int) -> None:
    """Case 137: nothing new starts; what ends frees its own folder only."""
    driven = Driven(limit, pool=limit)
    for number in range(limit + 1):
        driven.trigger(f"c{number}", worker=True, **in_folder(f"/w/{number}"))
    driven.crash()
    driven.trigger("more", worker=True, **in_folder("/w/more"))
    for number in range(limit):
        driven.trigger("other", f"B{number}", **in_folder(f"/w/{number}/sub"))
        assert driven.running(f"B{number}") == []
    assert driven.running() == [f"c{number}" for number in range(limit)]
    assert len(driven.granted()) == limit
    driven.finish("c0")
    assert driven.running("B0") == ["other"]
    assert driven.running() == [f"c{number}" for number in range(1, limit + 1)]
    driven.check()
