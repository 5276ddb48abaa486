"""Plants bugs one at a time, and prints the test that notices each.

    python -m tests.mutants [--only jsonl-fsync,state-lock] [--jobs 2] [--list]

Every flush, rename, lock and check that a promise depends on is removed once, in a copy of the tree, and the
tests that its row names run. Exits 1 if one of them fails without any planted bug, or if a bug is not
noticed.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.planting import ROOT, Copy, DoesNotApply, Mutant, failures, is_begun, missing_tests
from tests.mutants.table import MUTANTS

TESTS_FAILED = 1  # pytest's exit status
# A bug may make a test wait for what never comes. By a signal, as elsewhere,
# an event loop in C would not be ended.
LIMIT = ("--timeout", "60", "--timeout-method", "thread")
PATIENCE_SECONDS = 20.0  # with a bug; a test that takes longer never ends


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows by name, with commas between them")
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="bugs at a time (default: one for each core)",
    )
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    options = parser.parse_args()
    wanted = set(filter(None, options.only.split(",")))
    if unknown := wanted - {mutant.name for mutant in MUTANTS}:
        parser.error(f"there is no row {', '.join(sorted(unknown))}; --list prints them")
    mutants = [mutant for mutant in MUTANTS if not wanted or mutant.name in wanted]
    if options.list:
        print("\n".join(f"{mutant.name:28} {mutant.promise}" for mutant in mutants))
        return
    if problems := [problem for mutant in mutants for problem in find_problems(mutant)]:
        sys.exit("\n".join(problems))
    with tempfile.TemporaryDirectory(prefix="visiond-mutants-", ignore_cleanup_errors=True) as folder:
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(options.jobs):
            free.put(Copy(Path(folder, str(number))))
        check_sound(free, mutants, options.jobs)
        with ThreadPoolExecutor(options.jobs) as pool:
            lines = list(pool.map(lambda mutant: (mutant, *attempt(free, mutant)), mutants))
    print("| planted bug | where | what it breaks | noticed by | s |\n|---|---|---|---|---|")
    for mutant, noticed, seconds in lines:
        place = f"{mutant.file}{f', {mutant.within}' if mutant.within else ''}"
        print(f"| {mutant.name} | {place} | {mutant.promise} | {noticed or 'NOT NOTICED'} | {seconds:.0f} |")
    missed = sum(not noticed for _, noticed, _ in lines)
    print(f"\n{len(lines)} bugs planted, {len(lines) - missed} noticed.")
    sys.exit(1 if missed else 0)


def find_problems(mutant: Mutant) -> list[str]:
    """Why a row cannot be used; empty if it can."""
    problems = [f"{mutant.name}: there is no tests/{test}" for test in missing_tests(mutant)]
    try:
        mutant.plant((ROOT / mutant.file).read_text())
    except (DoesNotApply, OSError) as error:
        problems.append(str(error))
    return problems


def check_sound(free: queue.SimpleQueue[Copy], mutants: Sequence[Mutant], jobs: int) -> None:
    """Check that no test fails without a bug; otherwise a failure would prove nothing."""
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    copy = free.get()
    status, text = copy.run(tests, *(("-n", str(jobs)) if jobs > 1 else ()))
    free.put(copy)
    if status:
        sys.exit(f"{text[-6000:]}\nwithout any planted bug the tests fail (pytest's exit status is {status})")
    print(f"without a bug: {text.strip().splitlines()[-1]}", file=sys.stderr, flush=True)


def find_noticed(status: int, text: str) -> str:
    """Which test noticed a bug, empty if none did, from pytest's exit status and what it printed."""
    if status != TESTS_FAILED:
        return ""
    return ", ".join(failures(text)) or ("a run without an end" if is_begun(text) else "")


def attempt(free: queue.SimpleQueue[Copy], mutant: Mutant) -> tuple[str, float]:
    """Plant a bug in one of the copies that are free. Returns which test noticed it, empty if none did, and after how many
    seconds."""
    copy = free.get()
    source = (copy.root / mutant.file).read_text()
    started = time.monotonic()
    copy.write(mutant.file, mutant.plant(source))
    status, text = copy.run(mutant.tests, "--exitfirst", *LIMIT, patience_seconds=PATIENCE_SECONDS)
    copy.write(mutant.file, source)
    free.put(copy)
    noticed = find_noticed(status, text)
    seconds = time.monotonic() - started
    print(
        f"{mutant.name}: {noticed or f'NOT NOTICED (pytest ended with {status})'} ({seconds:.0f} s)",
        file=sys.stderr,
        flush=True,
    )
    return noticed, seconds


if __name__ == "__main__":
    main()
