"""The one exception with which a command of ``berth`` ends: what happened, what was kept, what to do.

A program that fails at two in the morning is read by somebody who did not write it. Every failure that a user can meet
therefore carries these three parts, and ``berth`` prints them instead of a traceback. Anything else that escapes a
command is a bug of Berth and keeps its traceback.
"""


class CommandFailed(RuntimeError):  # noqa: N818 - it reads as what it is: the command failed
    """A command can't go on.

    Each part is one or more plain sentences: ``happened`` with the cause as far as it is known, ``kept`` about the
    data on disk and in Kafka, ``advice`` with the next step for the reader.
    """

    def __init__(self, happened: str, *, kept: str, advice: str) -> None:
        super().__init__(f"{happened}\nKept: {kept}\nTo do: {advice}")
        self.happened = happened
        self.kept = kept
        self.advice = advice
