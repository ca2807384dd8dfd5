"""The one exception with which a command of ``berth`` ends: what happened, what was kept, what to do.

A program that fails at two in the morning is read by somebody who did not write it. Every failure that a user can meet
therefore carries these three parts, and ``berth`` prints them instead of a traceback. Anything else that escapes a
command is a bug of Berth and keeps its traceback.
"""

from typing import Final

FAILED_EXIT_CODE: Final = 1
"""Also of commands that have found something: a violation, rows to write, a difference."""
LOG_UNREADABLE_EXIT_CODE: Final = 65
NOTHING_RECORDED_EXIT_CODE: Final = 66
AWAY_EXIT_CODE: Final = 69
"""A server that the command needs doesn't answer, or none is known."""
DOES_NOT_FIT_EXIT_CODE: Final = 78
"""As programs that run on end: topics, tables or positions are others than those that were there before."""


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
