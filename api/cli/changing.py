"""``berth pause``, ``resume``, ``stop``, ``limit``, ``approve``: what operators change, and what the log decided.

Each sends one request and tells the decision. What is so already stays so and is no failure: the same command may be
run again after a doubt.
"""

from typing import Annotated, Final

import typer

from api.cli.client import Json, JsonOption, asking
from api.cli.showing import UNLIMITED, AgentArgument
from api.cli.tables import moment, say, say_json

AgentOrSite = Annotated[str | None, typer.Argument(help="Id of the agent.")]
SiteOption = Annotated[str | None, typer.Option("--site", help="Id of a site, instead of an agent.")]


def pause(agent: AgentOrSite = None, site: SiteOption = None, as_json: JsonOption = False) -> None:
    """Start nothing more at an agent, or at a site; what runs goes on, what is asked for is queued.

    Example: berth pause writer, or berth pause --site default. berth agents and berth site say when all has ended:
    drained.
    """
    kind, id = _named(agent, site)
    with asking(as_json) as api:
        answer = api.write("POST", f"{kind}s", id, "pause")
    _tell(
        answer,
        as_json,
        f"{kind} {id} is paused: what runs goes on, and nothing new starts",
        f"{kind} {id} was paused already",
    )


def resume(agent: AgentOrSite = None, site: SiteOption = None, as_json: JsonOption = False) -> None:
    """End the pause of an agent, or of a site: its queue goes on in its order.

    Example: berth resume writer, or berth resume --site default
    """
    kind, id = _named(agent, site)
    with asking(as_json) as api:
        answer = api.write("POST", f"{kind}s", id, "resume")
    _tell(answer, as_json, f"{kind} {id} goes on with its queue", f"{kind} {id} was not paused")


def stop(
    agent: AgentArgument,
    trigger: Annotated[str | None, typer.Argument(help="Id of the trigger.")] = None,
    conversation: Annotated[
        str | None, typer.Option("--conversation", help="Id of a conversation: stop all that it has.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a trigger, or what a conversation has running and waiting. It is never tried again.

    What waits is gone at once. What runs keeps its slot until its runner's last word, at most for the time of grace.

    Example: berth stop writer issue-42, or berth stop writer --conversation thread-7
    """
    if (trigger is None) == (conversation is None):
        raise typer.BadParameter("give the id of a TRIGGER, or --conversation ID")
    with asking(as_json) as api:
        if trigger is not None:
            answer = api.write("DELETE", "agents", agent, "triggers", trigger)
        else:
            assert conversation is not None
            answer = api.write("POST", "agents", agent, "conversations", conversation, "stop")
    if as_json:
        say_json(answer)
    elif trigger is not None:
        say(_stopped(trigger, answer))
    else:
        say(*_stopped_conversation(conversation or "", answer))


def limit(
    agent: AgentArgument,
    number: Annotated[str, typer.Argument(metavar="N|unlimited", help="How many of its turns may run at once: 1..10.")],
    as_json: JsonOption = False,
) -> None:
    """Change how many turns of an agent may run at once. A lower limit stops nothing; a higher one starts more at once.

    Example: berth limit writer 3, or berth limit writer unlimited
    """
    if number != UNLIMITED and not (number.isascii() and number.isdecimal()):
        raise typer.BadParameter(f"{number!r} is neither a number from 1 to 10 nor {UNLIMITED}")
    wanted: int | str = UNLIMITED if number == UNLIMITED else int(number[:_DIGITS_MAX])
    with asking(as_json) as api:
        answer = api.write("PATCH", "agents", agent, body={"parallelism_limit": wanted})
    _tell(answer, as_json, f"the limit of {agent} is {wanted} now", f"the limit of {agent} was {wanted} already")


_DIGITS_MAX: Final = 9
"""Whatever begins with more is too large as well."""


_WHAT_IT_DOES: Final = {"running": "runs", "queued": "waits for its turn"}


def approve(
    agent: AgentArgument,
    trigger: Annotated[str, typer.Argument(help="Id of the trigger.")],
    as_json: JsonOption = False,
) -> None:
    """Let a trigger start that waits for approval, or for a conversation that failed or was stopped.

    Example: berth approve writer issue-42. berth queue shows what waits for approval_required or dependency_failed.
    """
    with asking(as_json) as api:
        answer = api.write("POST", "agents", agent, "triggers", trigger, "approve")
    _tell(
        answer,
        as_json,
        f"{trigger} is approved and {_WHAT_IT_DOES.get(answer['status'], 'has ended: ' + answer['status'])}",
        f"{trigger} is {answer['status']}, and needed no approval",
    )


def _named(agent: str | None, site: str | None) -> tuple[str, str]:
    """The kind and id of what the command is about."""
    if (agent is None) == (site is None):
        raise typer.BadParameter("give the id of an AGENT, or --site ID")
    return ("agent", agent) if agent is not None else ("site", site or "")


def _tell(answer: Json, as_json: bool, changed: str, unchanged: str) -> None:
    if as_json:
        say_json(answer)
    else:
        say(f"{changed if answer['effect'] else unchanged} (decision {answer['seq']})")


def _stopped(trigger: str, answer: Json) -> str:
    decision = f"(decision {answer['seq']})"
    match answer["status"]:
        case "stopped" if answer["effect"]:
            return f"{trigger} is stopped {decision}"
        case "stop_requested":
            until = answer.get("grace_until")
            free = f"its slot is free at the latest at {moment(until)}" if until else "it was told before"
            return f"the runner of {trigger} is told to stop; {free} {decision}"
        case state:
            return f"{trigger} had ended already: {state} {decision}"


def _stopped_conversation(conversation: str, answer: Json) -> list[str]:
    lines = [f"{one} is stopped" for one in answer["stopped"]]
    lines += [f"the runner of {one} is told to stop" for one in answer["stop_requested"]]
    if answer["more"]:
        lines.append("there is more to stop, which goes on by itself")
    if not lines:
        told = answer["status"] == "stop_requested"
        lines = [f"{conversation}: its runner was told before" if told else f"{conversation} has nothing to stop"]
    lines[-1] += f" (decision {answer['seq']})"
    return lines
