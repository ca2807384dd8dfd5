"""``python -m tests.golden.record``: write the recorded logs that don't exist yet. Delete one to record it anew."""

import sys

from streams.audit.slices import written
from tests.audits import of_agent
from tests.golden.files import commands_file, commands_of, slice_file, written_by, written_file
from tests.golden.forms import FORMS_FILE, all_forms
from tests.golden.scenarios import SCENARIOS, SLICED


def main() -> None:
    for scenario in SCENARIOS:
        if scenario in SLICED and not slice_file(scenario.__name__).exists():
            slice_file(scenario.__name__).write_bytes(b"".join(written("A", of_agent(scenario()))))
            sys.stdout.write(f"recorded agent A of {scenario.__name__}\n")
        if commands_file(scenario.__name__).exists():
            continue
        driven = scenario()
        driven.check()
        commands_file(scenario.__name__).write_bytes(commands_of(driven))
        written_file(scenario.__name__).write_bytes(written_by(driven))
        sys.stdout.write(f"recorded {scenario.__name__}: {len(driven.decisions)} decisions\n")
    if not FORMS_FILE.exists():
        FORMS_FILE.write_bytes(b"".join(line + b"\n" for line in all_forms()))
        sys.stdout.write("recorded the forms\n")


if __name__ == "__main__":
    main()
