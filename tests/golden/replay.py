"""``python -m tests.golden.replay``: decide every recorded log anew; exit 1 at the first byte that differs."""

import sys

from tests.golden.files import replayed, written_by, written_file
from tests.golden.scenarios import SCENARIOS


def difference(name: str) -> str | None:
    """The first line that differs, as it was and as it is; None if there is none."""
    before = written_file(name).read_bytes().splitlines()
    now = written_by(replayed(name)).splitlines()
    for number, (old, new) in enumerate(zip(before, now, strict=False), 1):
        if old != new:
            return f"{name}, line {number}:\n  was {old.decode()}\n  is  {new.decode()}"
    return None if len(before) == len(now) else f"{name}: {len(before)} lines before, {len(now)} now"


def main() -> int:
    differences = [found for scenario in SCENARIOS if (found := difference(scenario.__name__)) is not None]
    for found in differences:
        sys.stderr.write(found + "\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
