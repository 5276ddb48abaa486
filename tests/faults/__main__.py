"""Runs every fault of the catalogue in full, and prints a table of the outcomes.

    VISIOND_ALONE=1 python -m tests.faults [--only 9,10] [--seed 1]

Exits 1 if a row fails. The same seed gives the same moments, as far as the machine allows.
Without VISIOND_ALONE, promised times have the slack of tests that share a machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import secrets
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

from tests.faults.catalogue import ROWS, Figure, Row


def attempt(row: Row, seed: int) -> tuple[Figure, float]:
    """The outcome, and the seconds that it took. A failed assertion is a failed row, and the table goes on."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="visiond-faults-", ignore_cleanup_errors=True) as folder:
        try:
            figure = row.attempt(Path(folder), random.Random(seed), row.full)
        except pytest.skip.Exception as reason:
            figure = Figure(f"not tried: {reason}", True)
        except Exception as error:  # noqa: BLE001 - of the daemon, or of the test: both are told
            traceback.print_exc()
            figure = Figure(f"{type(error).__name__}: {error}"[:300], False)
    return figure, time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows by number, with commas between them")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    wanted = set(filter(None, options.only.split(",")))
    if unknown := wanted - {row.number for row in ROWS}:
        parser.error(
            f"there is no row {', '.join(sorted(unknown))}; rows are {', '.join(row.number for row in ROWS)}"
        )
    lines = []
    passed = True
    for row in ROWS:
        if not wanted or row.number in wanted:
            figure, seconds = attempt(row, options.seed)
            print(f"{row.number} {row.fault}: {figure.text} ({seconds:.0f} s)", file=sys.stderr, flush=True)
            verdict = "FAIL" if not figure.passed else "" if figure.text.startswith("not tried") else "pass"
            passed = passed and figure.passed
            lines.append(
                f"| {row.number} | {row.fault} | {row.goal} | {figure.text.splitlines()[0]} | {verdict} | {seconds:.0f} |"
            )
    cores, memory = (
        len(os.sched_getaffinity(0)),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30,
    )
    print(
        f"Seed {options.seed}; {cores} cores, {memory} GiB, Linux {platform.release()}, Python {platform.python_version()}.\n"
    )
    print("| # | fault | promised | figure | | s |\n|---|---|---|---|---|---|")
    print("\n".join(lines))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
