"""``berth``, and ``python -m api.cli`` for processes that start each other.

Importing takes a second. Who presses Ctrl-C in it ends the process, as any program that has done nothing yet, and isn't
shown where in a library it was.
"""

import signal


def main() -> None:
    """Run the command line."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # else it is ignored, or somebody's own
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from api.cli.main import app  # noqa: PLC0415 - only now, see above

    signal.signal(signal.SIGINT, usual)
    app()


if __name__ == "__main__":
    main()
