"""Operators' commands on a running Berth: what each shows, as text and as JSON, what it changes, and how it is refused.

The commands run in this process, as typer's own tests do, also those of docs/operate.md.
"""

import asyncio
import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from aiokafka import AIOKafkaProducer
from typer.testing import CliRunner

from api.cli.client import Refused
from api.cli.main import app
from api.http.auth import Role
from streams import CLAIMS, TRIGGERS
from streams.codec import Record, partition_of
from streams.partition import dead_letter
from streams.rules.limits import RECORD_BYTES_MAX
from tests.brokers import WAIT_SECONDS
from tests.integration.http_stack import Stack, got, limited, read_at
from tests.integration.workers import PARTITIONS, ROOT, Json
from tests.tokens import AUTHENTICATION, SECRET

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Shell:
    """``berth`` as somebody runs it on this machine; ``token``: of somebody else than the local admin."""

    berth: Stack
    directory: Path

    def environment(self, token: str | None = None) -> dict[str, str | None]:
        ours: dict[str, str | None] = {name: None for name in os.environ if name.startswith("BERTH_")}
        return ours | {
            "BERTH_API": str(self.berth.http.base_url).rstrip("/"),
            "BERTH_JWT_SECRET": SECRET,
            "BERTH_DATA_DIRECTORY": str(self.directory),
            "BERTH_TOKEN": token,
        }

    async def run(self, *words: str, token: str | None = None) -> Any:
        invoke = CliRunner().invoke
        return await asyncio.to_thread(invoke, app, list(words), env=self.environment(token))

    async def said(self, *words: str) -> str:
        """What a command prints that succeeds."""
        done = await self.run(*words)
        assert done.exit_code == 0, (done.output, done.exception)
        return str(done.stdout)

    async def told(self, *words: str) -> Json:
        """The same as JSON."""
        answer: Json = json.loads(await self.said(*words, "--json"))
        return answer

    async def changed(self, path: str, *words: str) -> Json:
        """What a path of the API says when a command that changes something is visible there."""
        return await got(self.berth.http, path, min_position=(await self.told(*words))["log_position"])

    async def refused(self, *words: str, token: str | None = None) -> Refused:
        done = await self.run(*words, token=token)
        assert isinstance(done.exception, Refused), (done.output, done.exception)
        return done.exception


@pytest.fixture
def shell(berth: Stack, tmp_path: Path) -> Shell:
    return Shell(berth, tmp_path)


@pytest.fixture
def agent() -> str:
    return f"team/{uuid4().hex[:12]} ü%2F"


def path_of(agent: str, *further: str) -> str:
    return "/".join(("/api/agents", *(httpx_quoted(one) for one in (agent, *further))))


def httpx_quoted(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


def words_of(text: str) -> str:
    """The text with single spaces: tables are wide."""
    return " ".join(text.split())


async def ask(berth: Stack, agent: str, id: str, **content: Any) -> httpx.Response:
    answer = await berth.http.post(f"{path_of(agent)}/triggers", json={"id": id, **content})
    assert answer.status_code in (201, 202), answer.text
    return answer


async def busy(berth: Stack, agent: str) -> None:
    """An agent with limit 1: issue/1 runs, issue/2 and issue/3 wait."""
    await limited(berth.http, httpx_quoted(agent), 1, owner="ann", display_name="[red]Writer")
    for number in (1, 2, 3):
        last = await ask(
            berth, agent, f"issue/{number}", conversation_id=f"thread/{number}", message="do [bold]it\x1b[2J"
        )
    await read_at(berth.http, last, path_of(agent))


# Showing


async def test_agents_are_listed_and_one_is_shown_with_its_slots(berth: Stack, shell: Shell, agent: str) -> None:
    await busy(berth, agent)
    [listed] = [one for one in (await shell.told("agents", "--rows", "5000"))["agents"] if one["agent_id"] == agent]
    assert (listed["running"], listed["waiting"], listed["limit"]) == (1, 2, 1)
    [line] = [line for line in (await shell.said("agents", "--rows", "5000")).splitlines() if line.startswith(agent)]
    assert words_of(line) == f"{agent} 1 1 2 0 ann"
    async with asyncio.timeout(WAIT_SECONDS):  # texts come into the tables by themselves
        while not (slots := (await berth.http.get(f"{path_of(agent)}/capacity")).json()["slots"])[0]["message_preview"]:
            await asyncio.sleep(0.02)
    one = await shell.told("agents", agent)
    for slot in (*slots, *one["slots"]):
        del slot["duration_seconds"]
    assert one.pop("slots") == slots
    assert one == (await berth.http.get(path_of(agent))).json()
    said = await shell.said("agents", agent)
    assert "issue/1" in said and "thread/1" in said and "[red]Writer" in said
    assert "do [bold]it\ufffd[2J" in said and "\x1b" not in said


async def test_a_queue_is_shown_in_start_order_with_reasons(berth: Stack, shell: Shell, agent: str) -> None:
    await busy(berth, agent)
    told = await shell.told("queue", agent)
    assert told == (await berth.http.get(f"{path_of(agent)}/queue")).json()
    said = await shell.said("queue", agent)
    assert said.startswith(f"2 waiting at {agent}")
    found = re.findall(r"^(\d) +(issue/\d) .*?(\w+) *$", said, re.MULTILINE)
    assert found == [(str(n), f"issue/{n + 1}", "agent_parallelism_limit_reached") for n in (1, 2)]
    assert "There may be more: --rows" in await shell.said("queue", agent, "--rows", "1")


async def test_a_long_list_is_read_in_pages_and_shown_as_one(
    berth: Stack, shell: Shell, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await limited(berth.http, httpx_quoted(agent), 1)
    for number in range(6):
        last = await ask(berth, agent, f"t{number}")
    await read_at(berth.http, last, path_of(agent))
    monkeypatch.setattr("api.cli.client.PAGE_ROWS_MAX", 2)
    told = await shell.told("queue", agent)
    assert [one["trigger_id"] for one in told["queue"]] == [f"t{number}" for number in range(1, 6)]
    assert told["next_cursor"] is None
    first = await shell.told("queue", agent, "--rows", "3")
    assert [one["position"] for one in first["queue"]] == [1, 2, 3] and first["next_cursor"] is not None


async def test_a_trigger_is_shown_with_every_cause_who_holds_it_and_its_timeline(
    berth: Stack, shell: Shell, agent: str
) -> None:
    await busy(berth, agent)
    about = {"environment_id": "e", "folder": "/a", "message": "x"}
    await limited(berth.http, other := uuid4().hex, 1)
    await ask(berth, other, "holder", **about)
    last = await ask(berth, agent, "wants/all", approval_required=True, conversation_id="thread/1", **about)
    path = path_of(agent, "triggers", "wants/all").replace(httpx_quoted("triggers"), "triggers")
    async with asyncio.timeout(WAIT_SECONDS):
        while len((told := await read_at(berth.http, last, path))["waits_for"]) < 4 or not told["message"]:
            await asyncio.sleep(0.02)
    told = await shell.told("trigger", agent, "wants/all")
    assert told == (await berth.http.get(path)).json()
    said = await shell.said("trigger", agent, "wants/all")
    causes = re.findall(r"^waits for (\d) of (\d): (\w+)", said, re.MULTILINE)
    assert [cause[2] for cause in causes] == [one["reason"] for one in told["waits_for"]]
    assert {"conversation_busy", "approval_required", "agent_parallelism_limit_reached"} <= {one[2] for one in causes}
    part = said.partition("agent_environment_folder_busy")[2].partition("timeline")[0]
    assert other in part and "holder" in part and "running" in part
    assert re.search(r"ends with +the approval of a person", said)
    assert re.search(r"^\d+ +20\d\d-.* accepted +trigger ", said.partition("timeline")[2], re.MULTILINE)
    running = await shell.said("trigger", agent, "issue/1")
    assert "waits for" not in running and re.search(r"^1 +\S+ +1 .* running", running, re.MULTILINE)


async def test_a_refused_trigger_is_shown_with_its_code(berth: Stack, shell: Shell, agent: str) -> None:
    await busy(berth, agent)
    refused = await berth.http.post(
        f"{path_of(agent)}/triggers", json={"id": "no", "kind": "chat", "interactive": True}
    )
    assert refused.status_code == 409
    await read_at(berth.http, refused, path_of(agent))
    said = await shell.said("trigger", agent, "no")
    assert re.search(r"state +refused", said) and "agent_parallelism_limit_reached" in said


async def test_a_conversation_is_shown_with_its_triggers(berth: Stack, shell: Shell, agent: str) -> None:
    await busy(berth, agent)
    told = await shell.told("conversation", agent, "thread/2")
    path = f"{path_of(agent)}/conversations/{httpx_quoted('thread/2')}"
    assert told == (await berth.http.get(path)).json()
    said = await shell.said("conversation", agent, "thread/2")
    assert re.search(r"state +queued", said) and re.search(r"^issue/2 +waiting ", said, re.MULTILINE)


async def test_a_site_is_shown_with_who_holds_what_who_waits_and_its_gates(
    berth: Stack, shell: Shell, agent: str
) -> None:
    site = f"site/{uuid4().hex[:12]}"
    path = f"/api/sites/{httpx_quoted(site)}"
    await berth.http.put(f"{path}/capacity", json={"capacity": 1})
    await berth.http.put(f"{path}/departments/d%2F1", json={"enabled": False, "run_budget": 5})
    await limited(berth.http, httpx_quoted(agent), 5)
    await ask(berth, agent, "has", site=site, worker=True, environment_id="e", folder="/src")
    await ask(berth, agent, "wants", site=site, worker=True)
    async with asyncio.timeout(WAIT_SECONDS):
        while (found := (await berth.http.get(path)).json()).get("waiting") != 1 or not found["held"][0][
            "execution_id"
        ]:
            await asyncio.sleep(0.02)
    assert await shell.told("site", site) == found
    said = await shell.said("site", site)
    assert "1 of 1 taken" in said and "e:/src" in said
    assert re.search(rf"^{agent} +has +has .* yes +e:/src", said.partition("held by")[2], re.MULTILINE)
    assert re.search(rf"^{agent} +wants +yes", said.partition("waiting, in start order")[2], re.MULTILINE)
    assert re.search(r"^department +d/1 +disabled, drained +5 +0", said.partition("gates")[2], re.MULTILINE)
    listed = [one for one in (await shell.told("site"))["sites"] if one["site"] == site]
    assert [one["running"] for one in listed] == [1]
    assert re.search(rf"^{site} +1 +1 +1 +1", await shell.said("site"), re.MULTILINE)


# Changing


async def test_a_limit_is_changed_and_starts_what_waits(berth: Stack, shell: Shell, agent: str) -> None:
    await busy(berth, agent)
    told = await shell.changed(path_of(agent), "limit", agent, "2")
    assert (told["parallelism_limit"], told["running"], told["waiting"]) == (2, 2, 1)
    assert "was 2 already" in await shell.said("limit", agent, "2")
    assert re.search(r"is unlimited now \(decision \d+\)", await shell.said("limit", agent, "unlimited"))
    refused = await shell.refused("limit", agent, "11")
    assert refused.problem["code"] == "invalid_field" and "Nothing was changed" in refused.happened
    missing = await shell.refused("limit", "nobody/" + agent, "2")
    assert missing.problem["code"] == "agent_not_found" and "berth agents" in missing.advice


async def test_an_agent_and_a_site_are_paused_and_resumed(berth: Stack, shell: Shell, agent: str) -> None:
    await busy(berth, agent)
    assert (await shell.changed(path_of(agent), "pause", agent))["paused"] is True
    assert f"agent {agent} was paused already" in await shell.said("pause", agent)
    assert (await shell.changed(path_of(agent), "resume", agent))["paused"] is False
    assert f"agent {agent} was not paused" in await shell.said("resume", agent)
    site = f"site/{uuid4().hex[:12]}"
    path = f"/api/sites/{httpx_quoted(site)}"
    await berth.http.put(f"{path}/capacity", json={"capacity": 1})
    told = await shell.changed(path, "pause", "--site", site)
    assert (told["paused"], told["drained"]) == (True, True)
    assert "paused, drained" in await shell.said("site", site)
    assert (await shell.changed(path, "resume", "--site", site))["paused"] is False
    assert f"site {site} was not paused" in await shell.said("resume", "--site", site)
    unknown = await shell.refused("pause", "--site", f"{site}/other")
    assert unknown.problem["code"] == "site_unknown" and "berth site" in unknown.advice


async def test_a_trigger_is_stopped_whether_it_waits_runs_or_has_ended(berth: Stack, shell: Shell, agent: str) -> None:
    await busy(berth, agent)
    assert re.match(r"issue/3 is stopped \(decision \d+\)", await shell.said("stop", agent, "issue/3"))
    assert "issue/3 had ended already: stopped" in await shell.said("stop", agent, "issue/3")
    told = await shell.told("stop", agent, "issue/1")
    assert (told["status"], told["effect"]) == ("stop_requested", True)
    assert "the runner of issue/1 is told to stop" in await shell.said("stop", agent, "issue/1")
    unknown = await shell.refused("stop", agent, "issue/9")
    assert unknown.problem["code"] == "trigger_unknown" and unknown.kept == "everything; nothing was changed."


async def test_a_conversation_is_stopped(berth: Stack, shell: Shell, agent: str) -> None:
    await busy(berth, agent)
    await ask(berth, agent, "issue/4", conversation_id="thread/1")
    said = await shell.said("stop", agent, "--conversation", "thread/1")
    assert "issue/4 is stopped" in said and "the runner of issue/1 is told to stop" in said
    assert (await shell.told("stop", agent, "--conversation", "thread/2"))["stopped"] == ["issue/2"]
    assert "thread/2 has nothing to stop" in await shell.said("stop", agent, "--conversation", "thread/2")


async def test_what_waits_for_approval_is_approved(berth: Stack, shell: Shell, agent: str) -> None:
    await limited(berth.http, httpx_quoted(agent), 1)
    for id in ("first", "second"):
        await ask(berth, agent, id, approval_required=True)
    assert "first is approved and runs" in await shell.said("approve", agent, "first")
    assert "second is approved and waits" in await shell.said("approve", agent, "second")
    assert "first is running, and needed no approval" in await shell.said("approve", agent, "first")
    assert (await shell.told("approve", agent, "first"))["effect"] is False


# Dead letters


async def dead(berth: Stack, reason: str, topic: str, key: str, value: bytes | None) -> tuple[str, str]:
    """A dead letter as a worker writes it, when it is in the tables: its partition and offset."""
    partition = partition_of(key, PARTITIONS)
    written = dead_letter(Record(topic, partition, 1042, key.encode(), value), reason, 0)
    producer = AIOKafkaProducer(bootstrap_servers=berth.kafka.bootstrap, max_request_size=2 * RECORD_BYTES_MAX)
    await producer.start()
    try:
        sent = await producer.send_and_wait(written.topic, value, written.key, partition, headers=list(written.headers))
    finally:
        await producer.stop()
    async with asyncio.timeout(WAIT_SECONDS):
        while (await berth.http.get(f"/api/dead-letters/{partition}/{sent.offset}")).status_code == 404:
            await asyncio.sleep(0.02)
    return str(partition), str(sent.offset)


def trigger(agent: str, id: str) -> bytes:
    return json.dumps({"type": "trigger", "v": 1, "id": id, "agent_id": agent, "conversation_id": "c"}).encode()


async def test_a_dead_letter_is_replayed_to_where_it_was_and_its_ids_tell_repetitions(
    berth: Stack, shell: Shell, agent: str
) -> None:
    await limited(berth.http, httpx_quoted(agent), 1)
    where = await dead(berth, "skipped", TRIGGERS.name, agent, trigger(agent, "was/skipped"))
    for _ in range(2):
        assert f"sent once more to {TRIGGERS.name}/{where[0]}" in await shell.said("dead-letters", "replay", *where)
    last = await ask(berth, agent, "after")
    told = await read_at(berth.http, last, f"{path_of(agent)}/triggers/{httpx_quoted('was/skipped')}")
    assert (told["state"], told["attempt"]) == ("running", 1)
    assert await berth.accepted(agent) == ["was/skipped", "after"]
    records = [record for record in await berth.records(TRIGGERS, agent) if record["id"] == "was/skipped"]
    origin = {"partition": int(where[0]), "offset": int(where[1]), "requested_by": "local"}
    assert [[(name, json.loads(value)) for name, value in record["headers"]] for record in records] == (
        [[("replays", origin)]] * 2
    )
    told = await shell.told("dead-letters", "replay", *where)
    assert (told["status"], told["topic"], told["reason"]) == ("accepted", TRIGGERS.name, "skipped")
    partition, offset = map(int, where)
    await berth.apis[0].logged("dead_letter_replayed", 3, partition=partition, offset=offset, subject="local")


async def test_what_still_cannot_be_read_becomes_a_dead_letter_again(berth: Stack, shell: Shell, agent: str) -> None:
    where = await dead(berth, "not_json", TRIGGERS.name, agent, b"{no \x1b[2J json \xff")
    listed = (await shell.told("dead-letters", "list", "--rows", "1000"))["dead_letters"]
    [one] = [one for one in listed if (str(one["partition"]), str(one["offset"])) == where]
    assert (one["reason"], one["key_preview"], one["source_offset"]) == ("not_json", agent, 1042)
    told = await shell.told("dead-letters", "show", *where)
    assert told == (await berth.http.get(f"/api/dead-letters/{'/'.join(where)}")).json()
    assert told["value"] is None and told["value_base64"] == "e25vIBtbMkoganNvbiD/"
    for words in (("list", "--rows", "1000"), ("show", *where)):
        assert "\x1b" not in await shell.said("dead-letters", *words)
    await shell.said("dead-letters", "replay", *where)
    async with asyncio.timeout(WAIT_SECONDS):
        while (await read_dead(berth, agent))[0]["reason"] != "not_utf8":
            await asyncio.sleep(0.02)
    again, first = await read_dead(berth, agent)
    assert (again["topic"], again["source_partition"]) == (first["topic"], first["source_partition"])


async def read_dead(berth: Stack, key: str) -> list[Json]:
    """The dead letters of a key, the newest first."""
    answer = (await berth.http.get("/api/dead-letters", params={"limit": 1000})).json()
    return [one for one in answer["dead_letters"] if one["key_preview"] == key]


async def test_dead_letters_come_in_pages_without_gap_or_repeat(berth: Stack, agent: str) -> None:
    wanted = [await dead(berth, "not_json", TRIGGERS.name, agent, b"x") for _ in range(5)]
    found: list[tuple[str, str]] = []
    cursor: dict[str, str] = {}
    while True:
        page = (await berth.http.get("/api/dead-letters", params={"limit": 2, **cursor})).json()
        found += [(str(one["partition"]), str(one["offset"])) for one in page["dead_letters"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert len(found) == len(set(found)) and found[:5] == wanted[::-1]
    wrong = await berth.http.get("/api/dead-letters", params={"cursor": "WyJ4IiwieCIsIngiXQ"})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid_field")


@pytest.mark.parametrize(
    ("topic", "value", "why"),
    [
        (CLAIMS.name, b"{}", "into which only workers write"),
        ("somebody.elses", b"{}", "into which only workers write"),
        (TRIGGERS.name, None, "it has no value"),
        (TRIGGERS.name, b"x" * RECORD_BYTES_MAX, "it is larger than"),
    ],
    ids=["claims", "foreign", "null", "oversized"],
)
async def test_what_cannot_be_replayed_says_why(
    berth: Stack, shell: Shell, agent: str, topic: str, value: bytes | None, why: str
) -> None:
    where = await dead(berth, "skipped", topic, agent, value)
    assert why in await shell.said("dead-letters", "show", *where)
    refused = await shell.refused("dead-letters", "replay", *where)
    assert refused.problem["code"] == "dead_letter_not_replayable" and why in refused.happened
    unknown = await shell.refused("dead-letters", "replay", where[0], "999999")
    assert unknown.problem["code"] == "dead_letter_unknown"


# Refusals


@pytest.mark.parametrize(
    ("role", "agents", "words", "code"),
    [
        ("admin", ("other",), ("queue", "mine"), "access_denied"),
        ("agent", ("*",), ("pause", "mine"), "person_required"),
        ("runner", ("*",), ("approve", "mine", "t"), "person_required"),
        ("person", ("*",), ("pause", "--site", "default"), "role_required"),
        ("person", ("*",), ("dead-letters", "list"), "role_required"),
        ("admin", ("mine",), ("dead-letters", "list"), "access_denied"),
    ],
)
async def test_whoever_may_not_is_told_what_token_it_takes(
    shell: Shell, role: Role, agents: tuple[str, ...], words: tuple[str, ...], code: str
) -> None:
    refused = await shell.refused(*words, token=AUTHENTICATION.issue("ann", role, agents, 1))
    assert refused.problem["code"] == code and "BERTH_TOKEN" in refused.advice


async def test_a_token_that_is_none_is_refused_with_how_to_get_one(shell: Shell) -> None:
    refused = await shell.refused("agents", token="nonsense")
    assert refused.problem["code"] == "token_refused"
    assert "$(berth token)" in refused.advice and refused.kept == "everything; this only reads."


# The document

SECTIONS = re.split(r"^## ", (Path(ROOT) / "docs" / "operate.md").read_text(), flags=re.MULTILINE)
BLOCKS = [
    (section.splitlines()[0], block)
    for section in SECTIONS
    if section.startswith(("From the command line", "Bad records"))
    for block in re.findall(r"^```console\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
]


async def test_the_commands_of_the_document_do_what_it_says(berth: Stack, shell: Shell) -> None:
    assert [title for title, _ in BLOCKS] == ["From the command line"] * 3 + ["Bad records"]
    await limited(berth.http, "writer", 1)
    await ask(berth, "writer", "issue-41", conversation_id="thread-7", worker=True)
    last = await ask(berth, "writer", "issue-42", approval_required=True)
    await read_at(berth.http, last, "/api/agents/writer")
    async with asyncio.timeout(WAIT_SECONDS):
        while (await berth.http.get("/api/sites/default")).status_code == 404:
            await asyncio.sleep(0.02)
    partition, offset = await dead(berth, "skipped", TRIGGERS.name, "writer", trigger("writer", "issue-40"))
    said = ""
    for line in "".join(block for _, block in BLOCKS).replace("3 17", f"{partition} {offset}").splitlines():
        program, *words = shlex.split(line.removeprefix("$ "))
        assert program == ".venv/bin/berth"
        said += await shell.said(*words)
    for shown in ("waits for 1 of 2: approval_required", "issue-42 is approved", "the limit of writer is 3 now"):
        assert shown in said
