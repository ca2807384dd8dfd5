"""The log alone is enough: each command decided anew on the fold of what came before gives the same events."""

from collections.abc import Callable

import pytest

from streams.rules import events, limits
from streams.rules.agent.decide import decide
from streams.rules.agent.state import Agent
from tests.driving import Driven
from tests.golden.scenarios import SCENARIOS
from tests.model.test_long_runs import Life


def recompute(values: list[bytes]) -> int:
    """Decide every logged command again, with no input but the log; returns how many had events."""
    agents: dict[str, Agent] = {}
    effects = 0
    for value in values:
        logged = events.read_decision(value)
        agent = agents.setdefault(logged.agent_id, Agent(logged.agent_id))
        default = getattr(logged.command, "default_limit", None)
        step = decide(agent, logged.command, logged.at, logged.via, limits.Defaults(default or 1))
        again = (step.seq, tuple(step.emitted), step.refusal, step.ignored)
        assert again == (logged.seq, logged.events, logged.refusal, logged.ignored), logged
        effects += bool(step.emitted)
    return effects


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.__name__ for scenario in SCENARIOS])
def test_a_recorded_log_is_recomputed_from_itself(scenario: Callable[[], Driven]) -> None:
    """design.md: folding the commands through decide gives the events again."""
    driven = scenario()
    assert recompute(driven.values) > 0 or not driven.events_of()


@pytest.mark.parametrize("life", range(2))
def test_a_long_life_is_recomputed_from_its_log(life: int, seed: int) -> None:
    """Also through crashes, repeats, outages and forgetting: nothing but the log went into it."""
    lived = Life(seed * 1000 + 500 + life)
    for _ in range(1000):
        lived.step()
    lived.pair.advance(100 * 86_400)
    assert recompute(lived.pair.driven.values) > 200
