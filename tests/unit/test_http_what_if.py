"""What is asked over HTTP reaches the command as it was meant, whatever the ids are."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from api.cli.what_if import _capacity, _gate, _limit
from api.http.requests import WhatIfRequest
from api.http.what_if import words_of

IDS = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("/:=%*- \"'"), min_size=1, max_size=12
) | st.sampled_from(["organization:a", "x/organization:a", "a=closed", "%2F", "--json", "*"])
GATES = st.fixed_dictionaries(
    {"name": IDS, "scope": st.sampled_from(["organization", "department"]), "enabled": st.booleans()},
    optional={"site": IDS},
)
READERS: dict[str, Any] = {"--limit": _limit, "--capacity": _capacity, "--gate": _gate}


@given(
    st.dictionaries(IDS, st.integers(1, 10) | st.just("unlimited"), max_size=4),
    st.dictionaries(IDS, st.integers(0, 10_000), max_size=4),
    st.lists(GATES, max_size=4, unique_by=lambda gate: (gate.get("site", "default"), gate["scope"], gate["name"])),
    st.integers(1, 10),
)
def test_the_command_reads_what_was_asked(
    limits: dict[str, Any], capacities: dict[str, int], gates: list[Any], limit: int
) -> None:
    limits = {**limits, "A": limit}
    request = WhatIfRequest.model_validate({"limits": limits, "capacities": capacities, "gates": gates})
    command, as_json, *words = words_of(request)
    assert (command, as_json) == ("what-if", "--json")
    found: dict[str, list[Any]] = {option: [] for option in READERS}
    for word in words:
        option, _, value = word.partition("=")
        found[option].append(READERS[option](value))
    assert dict(found["--limit"]) == limits
    assert dict(found["--capacity"]) == capacities
    assert found["--gate"] == [
        ((gate.get("site", "default"), gate["scope"], gate["name"]), gate["enabled"]) for gate in gates
    ]


def test_a_gate_that_is_given_twice_is_refused_with_its_name() -> None:
    gate = {"scope": "organization", "name": "acme", "enabled": True}
    apart = [{**gate, "name": "other"}, {**gate, "scope": "department"}, {**gate, "site": "north"}]
    assert len(WhatIfRequest.model_validate({"gates": [gate, *apart]}).gates) == 4
    for again in (gate, {**gate, "enabled": False}, {**gate, "site": "default"}):
        with pytest.raises(ValidationError, match="organization 'acme' at site 'default' twice"):
            WhatIfRequest.model_validate({"gates": [gate, *apart, again]})
