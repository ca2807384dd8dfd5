"""What is said, and with which exit code a command ends, when a server is away or a setting can't be used.

One place for all commands: they let these exceptions pass, and add nothing but what they had done until then.
"""

import re
from typing import Final

from aiokafka.errors import KafkaError

from api.cli.command_failed import AWAY_EXIT_CODE, FAILED_EXIT_CODE, CommandFailed
from streams.kafka.clients import is_outage
from streams.kafka.restore import TransactionLeftOpen
from streams.settings import NoServerKnown, SettingsRefused


def failure_of(error: Exception) -> CommandFailed | None:
    """What is said of an exception that every command may let pass; None: it is a bug, and keeps its traceback."""
    match error:
        case CommandFailed():
            return error
        case SettingsRefused():
            return CommandFailed(
                error.happened,
                kept="everything; nothing was started.",
                advice=error.advice,
                exit_code=AWAY_EXIT_CODE if isinstance(error, NoServerKnown) else FAILED_EXIT_CODE,
            )
        case TransactionLeftOpen():
            return CommandFailed(error.happened, kept="everything; nothing was written.", advice=error.advice)
        case KafkaError() if is_outage(error):
            return CommandFailed(
                f"Kafka can't be reached: {in_words(error)}.",
                kept="everything; this command has changed nothing.",
                advice="start it (berth up), or give the address of yours: BERTH_KAFKA=host:9092. "
                "berth doctor looks at the whole installation.",
                exit_code=AWAY_EXIT_CODE,
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
