"""Operators' commands before they reach Berth, and when something else answers: addresses, tokens, refusals, words."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket
from threading import Thread
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from api.cli import local_secret, tables
from api.cli.client import ADVICE, Refused, segment
from api.cli.endpoints import published
from api.cli.main import app
from api.http.auth import Authentication
from api.http.intake import decoded
from streams.settings import Settings
from tests.tokens import SECRET

ROOT = Path(__file__).parents[2]
READS: tuple[tuple[str, ...], ...] = (("agents",), ("agents", "a"), ("queue", "a"), ("trigger", "a", "t"))
READS += (
    ("conversation", "a", "c"),
    ("site",),
    ("site", "s"),
    ("dead-letters", "list"),
    ("dead-letters", "show", "1", "2"),
)
WRITES: tuple[tuple[str, ...], ...] = (("pause", "a"), ("pause", "--site", "s"), ("resume", "a"), ("stop", "a", "t"))
WRITES += (("stop", "a", "--conversation", "c"), ("limit", "a", "3"), ("approve", "a", "t"))
WRITES += (("dead-letters", "replay", "1", "2"),)
PROBLEM: dict[str, Any] = {
    "type": "urn:berth:problem:database_unavailable",
    "title": "Service Unavailable",
    "status": 503,
    "detail": "The database of the read side can't be reached, so nothing can be read now. Try again soon.",
    "code": "database_unavailable",
}


@dataclass
class Recorded:
    """What a server answers to everything, and what it was asked."""

    status: int
    body: bytes
    content_type: str = "application/problem+json"
    address: str = ""
    asked: list[tuple[str, str, str | None, bytes]] = field(default_factory=list)
    """Method, path, token, body."""


@contextmanager
def answering(status: int, content: Any, content_type: str = "application/problem+json") -> Iterator[Recorded]:
    """A server that isn't Berth and answers as one, or as something else, once did."""
    recorded = Recorded(status, content if isinstance(content, bytes) else json.dumps(content).encode(), content_type)

    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            recorded.asked.append((self.command, self.path, self.headers.get("Authorization"), body))
            self.send_response(recorded.status)
            self.send_header("Content-Type", recorded.content_type)
            self.send_header("Content-Length", str(len(recorded.body)))
            self.end_headers()
            self.wfile.write(recorded.body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do  # noqa: N815 - http.server's names

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        recorded.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield recorded
        finally:
            server.shutdown()
            thread.join()


def berth(directory: Path, *words: str, **variables: str) -> Any:
    ours: dict[str, str | None] = {name: None for name in os.environ if name.startswith("BERTH_")}
    return CliRunner().invoke(app, list(words), env=ours | {"BERTH_DATA_DIRECTORY": str(directory)} | variables)


def refused(directory: Path, *words: str, **variables: str) -> Refused:
    done = berth(directory, *words, **variables)
    assert isinstance(done.exception, Refused), (done.output, done.exception)
    return done.exception


def nobody() -> str:
    """An address at which nothing listens."""
    with closing(socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


# Who answers


@pytest.mark.parametrize("words", [*READS, *WRITES], ids=" ".join)
def test_when_nobody_answers_nothing_is_changed_and_it_says_how_to_start(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    address = nobody()
    error = refused(tmp_path, *words, BERTH_API=address)
    assert error.problem["code"] == "api_not_reached"
    assert address in error.happened and "BERTH_API names it" in error.happened and "refused" in error.happened
    assert error.kept == "everything; this only reads." if words in READS else "everything; nothing was changed."
    assert "berth run" in error.advice and "BERTH_API" in error.advice


@pytest.mark.parametrize(
    ("status", "then"),
    [
        ("running", "runs"),
        ("queued", "waits for its turn"),
        ("expired", "has ended: expired"),
        ("failed", "has ended: failed"),
    ],
)
def test_what_is_approved_is_said_to_run_wait_or_have_ended(tmp_path: Path, status: str, then: str) -> None:
    with answering(200, {"effect": True, "status": status, "seq": 3}, "application/json") as api:
        done = berth(tmp_path, "approve", "a", "t", BERTH_API=api.address, BERTH_TOKEN="t")
    assert f"t is approved and {then}" in done.output


@pytest.mark.parametrize("words", [*READS, *WRITES], ids=" ".join)
def test_a_problem_is_told_with_its_code_what_was_kept_and_what_to_do(tmp_path: Path, words: tuple[str, ...]) -> None:
    with answering(503, PROBLEM) as api:
        error = refused(tmp_path, *words, BERTH_API=api.address, BERTH_TOKEN="t")
        done = berth(tmp_path, *words, "--json", BERTH_API=api.address, BERTH_TOKEN="t")
    assert PROBLEM["detail"] in error.happened and "(database_unavailable, HTTP 503)" in error.happened
    assert ("isn't known" in error.kept) is (words in WRITES)
    assert error.advice == ADVICE["database_unavailable"]
    assert (done.exit_code, done.stdout) == (1, "")
    told = json.loads(done.stderr)
    assert told == {**PROBLEM, "kept": error.kept, "advice": error.advice}


@contextmanager
def silent(*, hangs_up: bool) -> Iterator[str]:
    """The address of a server that takes requests and never answers, or hangs up on them."""
    with closing(socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken: list[socket] = []

        def take() -> None:
            connection, _ = server.accept()
            connection.recv(65_536)
            taken.append(connection)
            if hangs_up:
                connection.close()

        thread = Thread(target=take)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            thread.join(10)
            for connection in taken:
                connection.close()


@pytest.mark.parametrize(("hangs_up", "reason"), [(False, "no answer in time"), (True, "disconnected without")])
@pytest.mark.parametrize(("words", "kept"), [(("agents",), "this only reads"), (("pause", "a"), "isn't known")])
def test_when_the_answer_is_lost_it_says_whether_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs_up: bool, reason: str, words: tuple[str, ...], kept: str
) -> None:
    monkeypatch.setattr("api.cli.client.ANSWER_SECONDS_MAX", 0.3)
    with silent(hangs_up=hangs_up) as address:
        error = refused(tmp_path, *words, BERTH_API=address)
    assert reason in error.happened and kept in error.kept


@pytest.mark.parametrize(
    ("status", "content", "content_type"),
    [
        (200, b"<html>hello</html>", "text/html"),
        (502, b"<html>Bad Gateway</html>", "text/html"),
        (404, {"message": "no"}, "application/json"),
        (301, b"", "text/plain"),
        (200, ["a"], "application/json"),
        (401, {"code": "token_required"}, "application/json"),
    ],
)
def test_what_is_not_berths_api_is_called_so(tmp_path: Path, status: int, content: Any, content_type: str) -> None:
    with answering(status, content, content_type) as other:
        error = refused(tmp_path, "agents", BERTH_API=other.address, BERTH_TOKEN="t")
    assert f"What answers at {other.address} is not Berth's API" in error.happened and str(status) in error.happened
    assert error.problem["code"] == "api_not_reached"


def test_a_detail_cannot_command_the_terminal(tmp_path: Path) -> None:
    with answering(404, {"code": "agent_not_found", "detail": "no agent \x1b[2J"}) as api:
        assert "\x1b" not in refused(tmp_path, "agents", "x", BERTH_API=api.address).happened


def test_a_person_sees_the_three_parts_and_exit_code_1(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    done = subprocess.run(
        [sys.executable, "-m", "api.cli", "agents"],
        cwd=ROOT,
        env=kept | {"BERTH_DATA_DIRECTORY": str(tmp_path), "BERTH_API": nobody(), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "can't be reached" in done.stderr and "Kept:" in done.stderr and "To do:" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_code_with_advice_is_documented() -> None:
    described = re.findall(r"`([a-z]+(?:_[a-z]+)+)`", (ROOT / "docs" / "errors.md").read_text())
    assert set(ADVICE) <= set(described)


# Where it is, and with which token


def test_the_api_of_this_directory_is_asked_with_an_admins_token_of_its_secret(tmp_path: Path) -> None:
    settings = Settings(data_directory=tmp_path)
    local_secret.ensure(settings)
    with answering(200, {"agents": [], "next_cursor": None}) as api, published(settings, api=api.address):
        done = berth(tmp_path, "agents")
    assert done.exit_code == 0 and "There are no agents yet" in done.stdout
    [(method, path, token, _)] = api.asked
    assert (method, path) == ("GET", "/api/agents?limit=100")
    caller = Authentication.of(settings, local_secret.find(settings)).caller([token or ""])
    assert (caller.role, caller.agents, caller.subject) == ("admin", None, "local")


def test_a_given_address_and_token_come_before_those_of_the_directory(tmp_path: Path) -> None:
    settings = Settings(data_directory=tmp_path)
    local_secret.ensure(settings)
    with answering(200, {"agents": [], "next_cursor": None}) as api, published(settings, api=nobody()):
        done = berth(tmp_path, "agents", BERTH_API=f"{api.address}/", BERTH_TOKEN=" mine\n")
    assert done.exit_code == 0
    assert api.asked[0][:3] == ("GET", "/api/agents?limit=100", "Bearer mine")


def test_without_a_secret_it_is_asked_without_a_token(tmp_path: Path) -> None:
    said = {"code": "token_required", "detail": "This address needs a token."}
    with answering(401, said) as api:
        error = refused(tmp_path, "agents", BERTH_API=api.address)
    assert api.asked[0][2] is None
    assert error.problem["code"] == "token_required" and 'export BERTH_TOKEN="$(berth token)"' in error.advice


def test_a_token_made_here_is_sent_to_no_other_machine(tmp_path: Path) -> None:
    error = refused(tmp_path, "agents", BERTH_API="http://192.0.2.1:8080", BERTH_JWT_SECRET=SECRET)
    assert error.problem["code"] == "token_required" and "another machine" in error.happened
    assert error.kept == "everything; nothing was asked."


def test_a_proxy_is_not_asked_for_this_machines_own_addresses(tmp_path: Path) -> None:
    with answering(200, {"agents": [], "next_cursor": None}) as api:
        proxies = {"HTTP_PROXY": nobody(), "http_proxy": nobody(), "NO_PROXY": "", "no_proxy": ""}
        assert berth(tmp_path, "agents", BERTH_API=api.address, **proxies).exit_code == 0


@pytest.mark.parametrize(
    "variables",
    [{"BERTH_TOKEN": "a b"}, {"BERTH_TOKEN": "é"}, {"BERTH_TOKEN": ""}, {"BERTH_API": "127.0.0.1:8080"}],
)
def test_a_setting_that_cannot_be_is_refused_before_anything_is_asked(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    with answering(200, {"agents": [], "next_cursor": None}) as api:
        done = berth(tmp_path, "agents", **({"BERTH_API": api.address} | variables))
    [variable] = variables
    assert done.exception is not None and variable in str(done.exception)
    assert api.asked == []


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "is no address" in refused(tmp_path, "agents", BERTH_API="http://127.0.0.1:abc").happened


# What is asked


@pytest.mark.parametrize("id", ["a/b", "%2F", ".", "..", "slots", "ü ?#&", "a:b@c", "\u2028", "t" * 200])
def test_every_id_reaches_the_api_as_it_is(tmp_path: Path, id: str) -> None:
    assert decoded(segment(id)) == id and "/" not in segment(id)
    with answering(404, {"code": "trigger_unknown", "detail": "none"}) as api:
        refused(tmp_path, "trigger", id, id, BERTH_API=api.address)
        refused(tmp_path, "stop", id, "--conversation", id, BERTH_API=api.address)
    (_, read, _, _), (method, written, _, _) = api.asked
    assert [decoded(part) for part in read.split("/")] == ["", "api", "agents", id, "triggers", id]
    assert [decoded(part) for part in written.split("/")] == ["", "api", "agents", id, "conversations", id, "stop"]
    assert method == "POST" and read.split("/")[3] != "slots"


@pytest.mark.parametrize("id", ["", "\udcff"])
def test_an_id_that_cannot_be_is_no_request(id: str) -> None:
    with pytest.raises(typer.BadParameter):
        segment(id)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pause",), "AGENT, or --site"),
        (("pause", "a", "--site", "s"), "AGENT, or --site"),
        (("resume",), "AGENT, or --site"),
        (("stop", "a"), "TRIGGER, or --conversation"),
        (("stop", "a", "t", "--conversation", "c"), "TRIGGER, or --conversation"),
        (("limit", "a", "many"), "nor unlimited"),
        (("limit", "a", "1.5"), "nor unlimited"),
        (("limit", "a", "²"), "nor unlimited"),
        (("queue", ""), "at least one character"),
        (("queue", "a", "--rows", "0"), "--rows"),
        (("dead-letters", "show", "1", "x"), "offset"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_asked(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = berth(tmp_path, *words, COLUMNS="200")
    assert done.exit_code == 2
    assert said.lower() in " ".join(done.output.split()).lower()


@pytest.mark.parametrize(("number", "sent"), [("3", 3), ("0", 0), ("unlimited", "unlimited"), ("9" * 30, 999999999)])
def test_a_limit_is_sent_as_it_is_meant_and_judged_by_the_api(tmp_path: Path, number: str, sent: int | str) -> None:
    with answering(400, {"code": "invalid_field", "detail": "parallelism_limit: no"}) as api:
        refused(tmp_path, "limit", "a", number, BERTH_API=api.address)
    [(method, path, _, body)] = api.asked
    assert (method, path, json.loads(body)) == ("PATCH", "/api/agents/a", {"parallelism_limit": sent})


@pytest.mark.parametrize("words", [*READS, *WRITES], ids=" ".join)
def test_every_help_has_an_example_that_says_the_command(words: tuple[str, ...]) -> None:
    names = words[:2] if words[0] == "dead-letters" else words[:1]
    done = CliRunner().invoke(app, [*names, "--help"], env={"COLUMNS": "200"})
    assert f"Example: berth {' '.join(names)}" in " ".join(done.output.split())


# Words

NOW = datetime(2026, 11, 29, 10, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("apart", "words"),
    [
        (timedelta(0), "0s"),
        (timedelta(seconds=59), "59s"),
        (timedelta(seconds=200), "3m 20s"),
        (timedelta(hours=2), "2h 0m"),
        (timedelta(days=3, hours=4, minutes=5), "3d 4h"),
        (timedelta(seconds=-90), "in 1m 30s"),
    ],
)
def test_ages_have_their_two_largest_units(apart: timedelta, words: str) -> None:
    instant = (NOW - apart).isoformat(timespec="microseconds").replace("+00:00", "Z")
    assert tables.age(instant, NOW) == words


def test_texts_lose_what_a_terminal_would_obey_and_keep_everything_else() -> None:
    assert tables.plain("a\x1b[31m\x07\u202eb\r\nü 漢 [bold]") == "a\ufffd[31m\ufffd\ufffdb\ufffd\nü 漢 [bold]"
    assert tables.one_line("a\n  b " + "c" * 200, 10) == "a b ccccc…"
    assert tables.one_line(None) is None


def test_a_table_in_a_pipe_keeps_every_id_whole(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 200
    tables.say_table("", ("one", "none", "two"), [(long, None, "[red]" + long), (None, "", 3)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["one", "two"], [long, "[red]" + long], ["3"]]


def test_a_claim_whose_folder_was_deleted_is_shown_with_none_and_not_with_the_whole_environment(tmp_path: Path) -> None:
    claim: dict[str, Any] = dict.fromkeys(("organization_id", "department_id", "conversation_id", "execution_id"))
    claim |= {"agent_id": "a", "worker": False, "opened_at": None, "granted_at": None, "passed": 0}
    places: dict[str, tuple[str | None, str | None]] = {
        "whole": ("e1", "/"),
        "deleted": ("e1", None),
        "without": (None, None),
    }
    claims = [claim | {"trigger_id": id, "environment_id": e, "path": path} for id, (e, path) in places.items()]
    site: dict[str, Any] = {"site": "s", "capacity": 1, "created": True, "paused": False, "paused_at": None}
    site |= {"waiting": 3, "granted": 3, "drained": False, "running": 0, "gates": [], "next_cursor": None}
    with answering(200, site | {"held": claims, "queue": claims}, "application/json") as api:
        said = berth(tmp_path, "site", "s", BERTH_API=api.address, BERTH_TOKEN="t").output
    held, waiting = said.split("waiting, in start order")
    for part in (held, waiting):
        assert re.search(r"^a +whole .*e1:/ ", part, re.MULTILINE), said
        assert re.search(r"^a +deleted .*no folder any more ", part, re.MULTILINE), said
        assert not re.search(r"^a +without .*(e1|folder)", part, re.MULTILINE), said
