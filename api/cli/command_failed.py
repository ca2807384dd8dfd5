"""The one exception with which a command of ``berth`` ends: what happened, what was kept, what to do.

A program that fails at two in the morning is read by somebody who did not write it. Every failure that a user can meet
therefore carries these three parts, and ``berth`` prints them instead of a traceback. Anything else that escapes a
command is a bug of Berth and keeps its traceback.
"""

import re
from typing import Final

from aiokafka.errors import KafkaError

from streams.kafka.clients import is_outage
from streams.settings import NoServerKnown, SettingsRefused

FAILED_EXIT_CODE: Final = 1
"""Also of commands that have found something: a violation, rows to write, a difference."""
LOG_UNREADABLE_EXIT_CODE: Final = 65
NOTHING_RECORDED_EXIT_CODE: Final = 66
AWAY_EXIT_CODE: Final = 69
"""A server that the command needs doesn't answer, or none is known."""
KAFKA_AWAY_EXIT_CODE: Final = AWAY_EXIT_CODE
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


def failure_of(error: Exception) -> CommandFailed | None:
    """What is said of an exception that every command may let pass; None: it is a bug, and keeps its traceback."""
    match error:
        case CommandFailed():
            return error
        case SettingsRefused():
            kept, code = "everything; nothing was started.", FAILED_EXIT_CODE
            if isinstance(error, NoServerKnown):
                code = AWAY_EXIT_CODE
            return CommandFailed(error.happened, kept=kept, advice=error.advice, exit_code=code)
        case KafkaError() if is_outage(error):
            return CommandFailed(
                f"Kafka can't be reached: {in_words(error)}.",
                kept="everything; this command has changed nothing.",
                advice="start it (berth up), or give the address of yours: BERTH_KAFKA=host:9092. "
                "berth doctor looks at the whole installation.",
                exit_code=KAFKA_AWAY_EXIT_CODE,
            )
    return None


def in_words(error: BaseException) -> str:
    """What a library says of its failure, without its classes' names before it."""
    said = _CLASS_NAMES.sub("", str(error)).strip().removesuffix(".")
    asked = _ASKED.findall(said) if said.startswith("Unable to bootstrap") else ()
    if asked:
        return f"nobody answers at {', '.join(':'.join(address) for address in asked)}"
    return said or ("it gave no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


_ASKED: Final = re.compile(r"\('([^']+)', (\d+),")
"""The addresses, as aiokafka prints them."""
_CLASS_NAMES: Final = re.compile(r"^(?:\w*(?:Error|Exception|Fenced|Epoch)\b(?:: ?|$))+")
