"""``berth agents``, ``queue``, ``trigger``, ``conversation``, ``site``: what there is, what waits and why.

Each asks one or two addresses of the API and shows the answer; with ``--json`` the answer itself.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

import typer

from api.cli.client import ROWS_DEFAULT, Json, JsonOption, RowsOption, asking
from api.cli.tables import age, clock, moment, one_line, say, say_fields, say_json, say_table, until

AgentArgument = Annotated[str, typer.Argument(help="Id of the agent.")]
UNLIMITED: Final = "unlimited"


def agents(
    agent: Annotated[str | None, typer.Argument(help="Id of one agent, to see its settings and slots.")] = None,
    rows: RowsOption = ROWS_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """List the agents with what runs and waits, or show one with its settings and slots.

    Example: berth agents, then berth agents writer. With --json one agent also has the slots of its capacity.
    """
    with asking(as_json) as api:
        if agent is None:
            answer = api.pages("agents", "agents", rows=rows)
        else:
            answer = api.read("agents", agent) | {"slots": api.read("agents", agent, "capacity")["slots"]}
    if as_json:
        say_json(answer)
    elif agent is None:
        _say_agents(answer)
    else:
        _say_agent(answer)


def queue(agent: AgentArgument, rows: RowsOption = ROWS_DEFAULT, as_json: JsonOption = False) -> None:
    """Show what waits at an agent, in the order in which it will start, and why.

    Example: berth queue writer. Then berth trigger writer ID says who holds what one of them waits for.
    """
    with asking(as_json) as api:
        answer = api.pages("queue", "agents", agent, "queue", rows=rows)
    if as_json:
        say_json(answer)
        return
    say_table(
        f"{answer['waiting']} waiting at {agent}",
        ("", "trigger", "conversation", "asked by", "since", "may start", "attempt", "waits for"),
        (
            (
                one["position"],
                one["trigger_id"],
                one["conversation_id"],
                one["requested_by"],
                age(one["accepted_at"]),
                until(one["available_at"]),
                f"{one['attempt'] + 1} comes" if one["attempt"] else None,
                _reasons(one["reasons"], one["waits_behind"]),
            )
            for one in answer["queue"]
        ),
        nothing="Nothing waits.",
    )
    _say_more(answer)


def trigger(
    agent: AgentArgument,
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of the trigger.")],
    as_json: JsonOption = False,
) -> None:
    """Show a trigger: its state, everything that it waits for and who holds that, its attempts, what the log says.

    Example: berth trigger writer issue-42
    """
    with asking(as_json) as api:
        answer = api.read("agents", agent, "triggers", id)
    if as_json:
        say_json(answer)
        return
    say_fields(f"trigger {id} of {agent}", _trigger_fields(answer))
    if answer["state"] == "waiting":
        _say_causes(answer["waits_for"])
    say_table(
        "attempts",
        ("", "execution", "slot", "dispatched", "ended", "outcome", "last seen", "error"),
        (
            (
                one["attempt"],
                one["execution_id"],
                f"{one['slot_number']}{' forced' if one['forced'] else ''}",
                moment(one["dispatched_at"]),
                age(one["ended_at"]),
                one["outcome"] or "running",
                age(one["last_seen_at"]),
                one_line(_as_text(one["error"])),
            )
            for one in answer["attempts"]
        ),
    )
    say_table(
        "timeline",
        ("decision", "at", "", "by", ""),
        ((one["seq"], moment(one["at"]), one["event"], one["command"], _details(one)) for one in answer["timeline"]),
    )


def conversation(
    agent: AgentArgument,
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of the conversation.")],
    rows: RowsOption = ROWS_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Show a conversation: its state, and its triggers, the newest first.

    Example: berth conversation writer thread-7
    """
    with asking(as_json) as api:
        answer = api.pages("triggers", "agents", agent, "conversations", id, rows=rows)
    if as_json:
        say_json(answer)
        return
    last = answer["last_outcome"]
    say_fields(
        f"conversation {id} of {agent}",
        (
            ("state", answer["state"]),
            ("live trigger", answer["live_trigger_id"]),
            ("triggers", f"{answer['triggers_count']}, {answer['live_count']} of them live"),
            ("began", moment(answer["created_at"])),
            ("last outcome", last and f"{last}, {moment(answer['last_outcome_at'])}"),
        ),
    )
    say_table(
        "triggers",
        ("trigger", "state", "since", "kind", "asked by", "attempts", "why it ended"),
        (
            (
                one["trigger_id"],
                one["state"],
                age(one["state_since"]),
                one["kind"],
                one["requested_by"],
                one["attempt"],
                one["end_reason"],
            )
            for one in answer["triggers"]
        ),
    )
    _say_more(answer)


def site(
    name: Annotated[str | None, typer.Argument(help="Id of one site, to see who holds what, and what waits.")] = None,
    rows: RowsOption = ROWS_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """List the sites with their workers, or show one: its pool, who holds workers and folders, what waits, gates.

    Example: berth site, then berth site default
    """
    with asking(as_json) as api:
        if name is None:
            answer = api.pages("sites", "sites", rows=rows)
        else:
            answer = api.pages("queue", "sites", name, rows=rows)
    if as_json:
        say_json(answer)
    elif name is None:
        say_table(
            "",
            ("site", "workers", "taken", "granted", "waiting", ""),
            (
                (one["site"], one["capacity"], one["running"], one["granted"], one["waiting"], _state_of_site(one))
                for one in answer["sites"]
            ),
            nothing="There are no sites yet: the first trigger that needs one makes the site default.",
        )
        _say_more(answer)
    else:
        _say_site(answer)


# Agents


def _say_agents(answer: Json) -> None:
    say_table(
        "",
        ("agent", "limit", "running", "waiting", "on hold", "owner", ""),
        (
            (
                one["agent_id"],
                _limit(one["limit"]),
                _running(one),
                one["waiting"],
                one["on_hold"],
                one["owner"],
                _state_of_agent(one),
            )
            for one in answer["agents"]
        ),
        nothing="There are no agents yet, or the token shows none: the first trigger of an agent makes it.",
    )
    _say_more(answer)


def _say_agent(answer: Json) -> None:
    budget = answer["run_budget"]
    say_fields(
        f"agent {answer['agent_id']}",
        (
            ("name", answer["display_name"]),
            ("owner", answer["owner"]),
            ("", _state_of_agent(answer)),
            ("limit", _limit(answer["limit"])),
            ("running", _running(answer)),
            ("waiting", f"{answer['waiting']}, of {answer['max_backlog_depth']} that may"),
            ("on hold", answer["on_hold"]),
            ("run budget", None if budget is None else f"{budget} attempts left"),
            ("environment", answer["default_environment_id"]),
            ("so far", ", ".join(f"{count} {name}" for name, count in answer["totals"].items())),
            ("parked", answer["parked"]),
        ),
    )
    say_table(
        "slots",
        ("", "trigger", "conversation", "execution", "attempt", "since", "message"),
        (
            (
                f"{one['slot_number']}{' forced' if one['forced'] else ''}",
                one["trigger_id"],
                one["conversation_id"],
                one["execution_id"],
                one["attempt"],
                age(one["started_at"]),
                one_line(one["message_preview"], 60),
            )
            for one in answer["slots"]
        ),
    )


def _limit(number: int | None) -> str:
    return UNLIMITED if number is None else str(number)


def _running(one: Json) -> str:
    return f"{one['running']} ({one['forced']} forced)" if one["forced"] else str(one["running"])


def _state_of_agent(one: Json) -> str:
    words = ("archived", "paused", "drained", "serial")
    return ", ".join([*(word for word in words if one[word]), *(["parked"] if one["parked"] is not None else [])])


# Triggers


def _trigger_fields(answer: Json) -> Iterable[tuple[str, Any]]:
    yield "state", f"{answer['state']} since {moment(answer['state_since'])}"
    yield "refused with", answer.get("code")
    yield "ended by", answer.get("end_reason")
    yield "position", answer["position"]
    yield "conversation", answer["conversation_id"]
    if "kind" not in answer:  # refused: nothing else is kept
        return
    yield "asked", f"by {answer['requested_by'] or 'somebody'}, {moment(answer['accepted_at'])}, kind {answer['kind']}"
    yield "may start", until(answer["available_at"])
    yield "expires", moment(answer["expires_at"])
    yield "needs", _needs(answer)
    yield "organization", answer["organization_id"]
    yield "department", answer["department_id"]
    yield "approved", answer["approved_by"] and f"by {answer['approved_by']}, {moment(answer['approved_at'])}"
    yield "failures", f"{answer['failures']} of {answer['max_attempts']}" if answer["failures"] else None
    yield "stop asked", answer["stop_requested_at"] and moment(answer["stop_requested_at"])
    yield "slot free by", moment(answer["grace_until"])
    yield "restarts", answer["restarts"]
    yield "message", one_line(answer["message"])
    yield "result", one_line(_as_text(answer["result"]))
    yield "error", one_line(_as_text(answer["error"]))


def _needs(one: Json) -> str | None:
    words = ["a worker"] if one["worker"] else []
    if one["environment_id"] is not None:
        words.append(f"{_folder(one['environment_id'], one['folder'])}{' (lost)' if one['degraded'] else ''}")
    return f"{' and '.join(words)} of site {one['site'] or 'default'}" if words else None


def _folder(environment_id: str | None, path: str | None) -> str | None:
    return None if environment_id is None else f"{environment_id}:{path or '/'}"


def _claimed_folder(one: Json) -> str | None:
    """A claim has the path for which it was compared with others; without it, its folder or environment was deleted."""
    if one["environment_id"] is not None and one["path"] is None:
        return "no folder any more"
    return _folder(one["environment_id"], one["path"])


def _say_causes(causes: Sequence[Json]) -> None:
    if not causes:
        say("waits for nothing: it is about to start")
    for number, one in enumerate(causes, start=1):
        where = [f"{word} {one[word]}" for word in ("site", "scope", "name") if word in one]
        say_fields(
            f"waits for {number} of {len(causes)}: {one['reason']}",
            (
                ("of", ", ".join(where)),
                ("since", moment(one["since"])),
                ("until", moment(one["until"])),
                ("ends with", one["released_by"]),
                ("held by", None if one["holders"] or not one["holders_count"] else one["holders_count"]),
            ),
        )
        more = one["holders_count"] - len(one["holders"])
        say_table(
            "",
            ("held by", "trigger", "conversation", "execution", "state", "since"),
            [
                *(
                    (
                        holder["agent_id"],
                        holder["trigger_id"],
                        holder["conversation_id"],
                        holder["execution_id"],
                        holder["state"],
                        age(holder["since"]),
                    )
                    for holder in one["holders"]
                ),
                *([(f"and {more} more", "", "", "", "", "")] if one["holders"] and more > 0 else []),
            ],
        )


def _reasons(reasons: Sequence[str], waits_behind: str | None) -> str:
    words = [f"{one} ({waits_behind})" if one == "conversation_busy" and waits_behind else one for one in reasons]
    return ", ".join(words) or "about to start"


def _details(entry: Json) -> str:
    """The event's own fields; times to the second."""
    shown = {name: value for name, value in entry.items() if name not in ("seq", "at", "event", "command")}
    return ", ".join(f"{name} {clock(value) if _is_instant(value) else value}" for name, value in shown.items())


def _is_instant(value: Any) -> bool:
    return isinstance(value, str) and _INSTANT.fullmatch(value) is not None


_INSTANT: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else str(value)


# Sites


def _say_site(answer: Json) -> None:
    say_fields(
        f"site {answer['site']}",
        (
            ("", _state_of_site(answer)),
            ("workers", f"{answer['running']} of {answer['capacity']} taken"),
            ("granted", answer["granted"]),
            ("waiting", answer["waiting"]),
            ("paused", moment(answer["paused_at"])),
        ),
    )
    say_table(
        "held by",
        ("agent", "trigger", "conversation", "execution", "worker", "folder", "since"),
        (
            (
                one["agent_id"],
                one["trigger_id"],
                one["conversation_id"],
                one["execution_id"] or "about to start",
                "yes" if one["worker"] else "",
                _claimed_folder(one),
                age(one["granted_at"]),
            )
            for one in answer["held"]
        ),
    )
    say_table(
        "waiting, in start order",
        ("agent", "trigger", "worker", "folder", "organization", "department", "since", "passed by"),
        (
            (
                one["agent_id"],
                one["trigger_id"],
                "yes" if one["worker"] else "",
                _claimed_folder(one),
                one["organization_id"],
                one["department_id"],
                age(one["opened_at"]),
                one["passed"],
            )
            for one in answer["queue"]
        ),
    )
    say_table(
        "gates",
        ("", "name", "", "run budget", "granted"),
        (
            (
                one["scope"],
                one["name"],
                "enabled" if one["enabled"] else f"disabled{', drained' if one['drained'] else ''}",
                one["run_budget"],
                one["granted"],
            )
            for one in answer["gates"]
        ),
    )
    _say_more(answer)


def _state_of_site(one: Json) -> str:
    return ", ".join([word for word in ("paused", "drained") if one[word]])


def _say_more(answer: Json) -> None:
    if answer["next_cursor"] is not None:
        say("There may be more: --rows says how many are shown.")
