"""What people may write after the commands that look back, and what they are told when it can't be meant."""

from datetime import UTC, datetime

import pytest
import typer
from typer.testing import CliRunner

from api.cli.log_reading import instant
from api.cli.main import app
from api.cli.what_if import _capacity, _gate, _limit
from streams.rules.order import SECOND


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("what-if",), "--limit, --capacity or --gate"),
        (("what-if", "--limit", "A=0"), "1 to 10"),
        (("what-if", "--limit", "A"), "AGENT=N"),
        (("what-if", "--limit", "=3"), "AGENT=N"),
        (("what-if", "--limit", "A=3.5"), "AGENT=N"),
        (("what-if", "--capacity", "here=-1"), "from 0 to 10000"),
        (("what-if", "--capacity", "10001"), "from 0 to 10000"),
        (("what-if", "--gate", "team:a=open"), "organization:NAME=open"),
        (("what-if", "--gate", "organization:a=ajar"), "organization:NAME=open"),
        (("what-if", "--limit", "A=2", "--limit", "B=2", "--limit", "A=3"), "'A=2' and 'A=3'"),
        (("what-if", "--limit", "*=2", "--limit", "*=unlimited"), "'*=2' and '*=unlimited'"),
        (("what-if", "--capacity", "8", "--capacity", "default=9"), "'8' and 'default=9'"),
        (
            ("what-if", "--gate", "organization:a=open", "--gate", "default/organization:a=closed"),
            "'organization:a=open' and 'default/organization:a=closed'",
        ),
        (("what-if", "--limit", "A=2", "--since", "1h", "--until", "2h"), "--since must be before"),
        (("what-if", "--limit", "A=2", "--since", "yesterday"), "RFC 3339"),
        (("waiting", "causes", "--by", "person"), "agent, organization or site"),
        (("waiting", "causes", "--since", "2026-03-01T10:00:00"), "with a zone"),
        (("explain", "A", "t", "t"), "named twice"),
        (("explain", "A", "t", "--other-agent", "B"), "a second trigger"),
        (("as-of", "--seq", "3"), "of one AGENT"),
        (("as-of", "A", "--seq", "3", "--at", "now"), "of one AGENT"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_read(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_changes_are_read_as_they_are_meant() -> None:
    assert _limit("a=b=3") == ("a=b", 3)
    assert _limit("*=unlimited") == ("*", "unlimited")
    assert _capacity("8") == ("default", 8)
    assert _capacity("north=0") == ("north", 0)
    assert _gate("organization:a:b=open") == (("default", "organization", "a:b"), True)
    assert _gate("north/department:d=closed") == (("north", "department", "d"), False)


def test_times_are_instants_ages_or_now() -> None:
    assert instant("2026-03-01T10:00:00.000001Z") == 1_772_359_200_000_001
    assert instant("2026-03-01T11:00:00+01:00") == 1_772_359_200_000_000
    now = datetime.now(UTC).timestamp() * SECOND
    for text, seconds in (("now", 0), ("90s", 90), ("1.5m", 90), ("2h", 7_200), ("3d", 259_200)):
        assert abs(now - seconds * SECOND - instant(text)) < 10 * SECOND
    with pytest.raises(typer.BadParameter, match="or an age"):
        instant("2w")
