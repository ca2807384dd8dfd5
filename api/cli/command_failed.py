"""The one exception with which a command of ``berth`` ends: what happened, what was kept, what to do.

A program that fails at two in the morning is read by somebody who did not write it. Every failure that a user can meet
therefore carries these three parts, and ``berth`` prints them instead of a traceback. Anything else that escapes a
command is a bug of Berth and keeps its traceback.
"""

from typing import Final

FAILED_EXIT_CODE: Final = 1
LOG_UNREADABLE_EXIT_CODE: Final = 65
NOTHING_RECORDED_EXIT_CODE: Final = 66
KAFKA_AWAY_EXIT_CODE: Final = 69
"""Those of the commands that look back: the API runs one of them and says what has happened in its own words."""


class CommandFailed(RuntimeError):  # noqa: N818 - it reads as what it is: the command failed
    """A command can't go on.

    Each part is one or more plain sentences: ``happened`` with the cause as far as it is known, ``kept`` about the
    data on disk and in Kafka, ``advice`` with the next step for the reader. ``exit_code``: another one than usual, for
    programs that tell one failure from another.
    """

    def __init__(self, happened: str, *, kept: str, advice: str, exit_code: int = FAILED_EXIT_CODE) -> None:
        super().__init__(f"{happened}\nKept: {kept}\nTo do: {advice}")
        self.happened = happened
        self.kept = kept
        self.advice = advice
        self.exit_code = exit_code


def kafka_away(error: Exception, exit_code: int = FAILED_EXIT_CODE) -> CommandFailed:
    """What is said by every command that Kafka doesn't answer."""
    return CommandFailed(
        f"Kafka can't be reached: {error}.",
        kept="everything; this command has changed nothing.",
        advice="start it (berth up), or give the address of yours: BERTH_KAFKA=host:9092. "
        "berth doctor looks at the whole installation.",
        exit_code=exit_code,
    )
