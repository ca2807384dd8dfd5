"""Says where the projection of decisions is after every batch, with the (monotonic) second. Argument: URL of Postgres.

A process of its own: in the one that writes the log its answers would wait for the writers.
"""

import sys
import time

import psycopg

from tests.bench.processes import say


def main(url: str) -> None:
    """Until the process is ended."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("LISTEN berth_projections")
        while True:
            try:
                found = connection.execute(
                    "SELECT partition, next_offset FROM berth.checkpoints WHERE topic = 'berth.decisions'"
                ).fetchall()
            except psycopg.errors.UndefinedTable:
                found = []
            say("positions", at_seconds=time.monotonic(), next_offsets=[list(row) for row in found])
            for _ in connection.notifies(timeout=0.5, stop_after=1):
                pass


if __name__ == "__main__":
    main(sys.argv[1])
