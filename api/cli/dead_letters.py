"""``berth dead-letters``: records that nobody could be answered for; replay one when its cause is gone."""

from typing import Annotated

import typer

from api.cli.client import ROWS_DEFAULT, Json, JsonOption, RowsOption, asking
from api.cli.tables import age, moment, one_line, say, say_fields, say_json, say_table

app = typer.Typer(
    help="Records that nobody could be answered for: see them, and send one once more. Needs an admin's token for all "
    "agents. Example: berth dead-letters list",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Partition = Annotated[int, typer.Argument(min=0, help="Partition of berth.dead-letters.")]
Offset = Annotated[int, typer.Argument(min=0, help="Offset in it.")]


@app.command("list")
def list_command(rows: RowsOption = ROWS_DEFAULT, as_json: JsonOption = False) -> None:
    """List dead letters, the newest first: why, where each was, how it begins.

    Example: berth dead-letters list --rows 20
    """
    with asking(as_json) as api:
        answer = api.pages("dead_letters", "dead-letters", rows=rows)
    if as_json:
        say_json(answer)
        return
    say_table(
        "",
        ("partition", "offset", "written", "reason", "was at", "key", "bytes", "begins"),
        (
            (
                one["partition"],
                one["offset"],
                age(one["written_at"]),
                one_line(one["reason"], 60),
                _origin(one),
                one_line(one["key_preview"], 40),
                one["value_bytes"],
                one_line(one["value_preview"], 40),
            )
            for one in answer["dead_letters"]
        ),
        nothing="There are no dead letters.",
    )
    if answer["next_cursor"] is not None:
        say("There may be more: --rows says how many are shown.")


@app.command("show")
def show_command(partition: Partition, offset: Offset, as_json: JsonOption = False) -> None:
    """Show one dead letter, whole. What a terminal might obey is replaced; --json has every character.

    Example: berth dead-letters show 3 17
    """
    with asking(as_json) as api:
        answer = api.read("dead-letters", str(partition), str(offset))
    if as_json:
        say_json(answer)
        return
    hindrance = answer["not_replayable_because"]
    say_fields(
        f"dead letter {partition} {offset}",
        (
            ("reason", answer["reason"]),
            ("written", moment(answer["written_at"])),
            ("was at", _origin(answer)),
            ("replay", "possible" if hindrance is None else f"not possible: {hindrance}"),
            ("key", answer["key"]),
            ("key, base64", answer["key_base64"]),
            ("value", answer["value"]),
            ("value, base64", answer["value_base64"]),
        ),
    )


@app.command("replay")
def replay_command(partition: Partition, offset: Offset, as_json: JsonOption = False) -> None:
    """Send the record of a dead letter once more to where it was: for when its cause is gone.

    Each time it is run the record is sent again. Ids in it tell repetitions: a trigger that was taken isn't taken
    twice. What still can't be read becomes a new dead letter.

    Example: berth dead-letters replay 3 17
    """
    with asking(as_json) as api:
        answer = api.write("POST", "dead-letters", str(partition), str(offset), "replay")
    if as_json:
        say_json(answer)
        return
    say(
        f"sent once more to {answer['topic']}/{answer['source_partition']}; "
        "berth dead-letters list shows it again if it still can't be read"
    )


def _origin(one: Json) -> str | None:
    """Where the record was; None where its headers don't say."""
    if one["topic"] is None:
        return None
    return f"{one['topic']} {one['source_partition']} {one['source_offset']}"
