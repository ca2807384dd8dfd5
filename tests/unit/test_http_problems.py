"""What a refused request is told to do: what would help, and nothing that can't be had."""

import pytest
from pydantic import TypeAdapter, ValidationError

from api.http.problems import of_refusal, of_validation
from streams.rules.messages import Id
from streams.rules.verdicts import Refusal


@pytest.mark.parametrize("allowed", [True, False])
def test_force_is_advised_only_where_it_is_allowed(allowed: bool) -> None:
    problem = of_refusal(Refusal(code="agent_parallelism_limit_reached", force_allowed=allowed), {})
    assert ("orce" in problem.detail) is allowed
    assert problem.members["force_allowed"] is allowed


@pytest.mark.parametrize(
    ("bound", "advised"), [("max_backlog_depth", "raise its max_backlog_depth"), ("backlog_bytes_max", "payloads")]
)
def test_a_full_backlog_names_the_bound_that_it_reached_in_a_sentence(bound: str, advised: str) -> None:
    problem = of_refusal(Refusal(code="agent_backlog_full", reason=bound), {})
    assert advised in problem.detail
    assert not problem.detail.startswith(bound)
    assert problem.members["reason"] == bound


@pytest.mark.parametrize("id", ["a\nb", "\x00", "tab\t", "\x9b"])
def test_control_characters_are_called_by_their_name(id: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(Id).validate_python(id)
    errors = [error | {"loc": ("body", "conversation_id")} for error in caught.value.errors()]
    problem = of_validation(errors)
    assert problem.detail == "conversation_id: must have no control characters. Nothing was changed."
