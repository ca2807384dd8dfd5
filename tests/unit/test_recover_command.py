"""What ``berth recover`` says: its hints agree with each other and with what it would do."""

from collections import Counter

import pytest
from aiokafka.errors import KafkaConnectionError, ProducerFenced, RequestTimedOutError

from api.cli import recover
from api.cli.recovering import Recovered
from streams.audit.logged import Decider
from streams.audit.recover import Ahead

WRITES = "To put rows of berth-state-changelog"


def part(number: int, *, is_cut: bool = False, is_written: bool = False) -> Recovered:
    found = Recovered(number, different=Counter(agent=1), is_written=is_written)
    if is_cut:
        found.ahead = [Ahead(Decider("agent", "writer"), 8, 7)]
    return found


def told(found: list[Recovered], capsys: pytest.CaptureFixture[str], *, write: bool = False, cut: bool = False) -> str:
    recover._print(found, write, cut)
    return capsys.readouterr().out


def test_a_cut_log_has_one_way_on_and_the_other_partitions_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    alone = told([part(2, is_cut=True), Recovered(3)], capsys)
    assert "Partition 2: the log has lost its end" in alone
    assert "berth recover --yes --accept-cut-log --partition 2\n" in alone
    assert WRITES not in alone and alone.endswith("Nothing was written.\n")
    beside = told([part(2, is_cut=True), part(5, is_cut=True), part(3)], capsys)
    assert "Partitions 2, 5: the log has lost its end" in beside
    assert "--accept-cut-log --partition 2 --partition 5\n" in beside
    assert beside.endswith(f"{WRITES} in the other partitions right: berth recover --yes\n")
    accepted = told([part(2, is_cut=True), part(3)], capsys, cut=True)
    assert "lost its end" not in accepted
    assert accepted.endswith(f"{WRITES} right: berth recover --yes --accept-cut-log\n")
    half = told([part(2, is_cut=True), part(3, is_written=True)], capsys, write=True)
    assert "Partition 2: the log has lost its end" in half and "Written: partition 3." in half
    assert "Nothing was written" not in half


def test_who_is_not_decided_again_is_named_without_blaming_another_version_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = part(0)
    one.looked_at_anew = ["agent writer"]
    said = told([one], capsys)
    assert "another version's rules, or rows that were damaged then); folded from their events: agent writer\n" in said
    assert "berth verify says which" in said
    assert "berth verify says which" not in told([part(0)], capsys)


def test_a_kafka_that_goes_away_meanwhile_has_the_code_for_that() -> None:
    for error in (KafkaConnectionError("gone"), RequestTimedOutError(), TimeoutError()):
        failed = recover._failure(error, [], 0, True)
        assert failed.exit_code == 69
    assert recover._failure(ProducerFenced(), [], 0, True).exit_code == 1
