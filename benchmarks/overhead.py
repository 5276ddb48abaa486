"""Measures the cost of the daemon itself: four fake stages compared with a bare loop, on the same files,
in the same run.

    python -m benchmarks.overhead --files 20000 --rounds 3

The bare loop reads each file, digests it, records it in SQLite (64 per commit, synchronous FULL) and writes a
sidecar: the minimum that any such program does.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from pathlib import Path

from benchmarks.harness import TEMPORARY, make_files, read_options, run_fakes, spread, work_folder

COMMIT = 64


def run_bare(inbox: Path, folder: Path) -> float:
    """Images per second of the bare loop."""
    results = folder / "bare"
    results.mkdir()
    connection = sqlite3.connect(folder / "bare.sqlite", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE image (path TEXT PRIMARY KEY, digest TEXT, result TEXT)")
    started = time.perf_counter()
    rows = []
    count = 0
    for entry in os.scandir(inbox):
        with open(entry.path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        result = json.dumps(
            {"schema": "bare", "path": entry.name, "digest": digest, "text": "nothing was looked at"}
        )
        rows.append((entry.name, digest, result))
        with open(results / f"{entry.name}.tmp", "w") as file:
            file.write(result)
        os.rename(results / f"{entry.name}.tmp", results / f"{entry.name}.json")
        count += 1
        if len(rows) == COMMIT:
            _commit(connection, rows)
            rows = []
    _commit(connection, rows)
    seconds = time.perf_counter() - started
    connection.close()
    return count / seconds


def _commit(connection: sqlite3.Connection, rows: list[tuple[str, str, str]]) -> None:
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO image VALUES (?, ?, ?)", rows)
    connection.execute("COMMIT")


def run_daemon(inbox: Path, folder: Path) -> float:
    """Images per second, as benchmarks.pairs asks each of two trees for it."""
    return run_fakes(folder, inbox=inbox).whole


def main() -> None:
    options = read_options(__doc__, files=20_000, rounds=3, folder=TEMPORARY)
    bare: list[float] = []
    daemon: list[float] = []
    ratios: list[float] = []
    for number in range(options.rounds):
        with work_folder(options.folder) as folder:
            make_files(folder / "inbox", options.files, number)
            for run, rates in ((run_bare, bare), (run_daemon, daemon)):
                os.sync()  # otherwise each waits for the disk to write what the other one left
                rates.append(run(folder / "inbox", folder))
        ratios.append(daemon[-1] / bare[-1])
        print(
            f"round {number + 1}: bare loop {bare[-1]:,.0f}/s, visiond {daemon[-1]:,.0f}/s, ratio {ratios[-1]:.3f}"
        )
    print(
        f"{options.files:,} files, {options.rounds} rounds, {len(os.sched_getaffinity(0))} cores, median (range):\n"
        f"  bare loop  {spread(bare)} images/s\n  visiond    {spread(daemon)} images/s\n"
        f"  ratio      {spread(ratios, 3)}"
    )


if __name__ == "__main__":
    main()
