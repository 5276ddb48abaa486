"""Measures the cost of the daemon itself: four fake stages compared with a bare loop, on the same files, in the same run.

    python -m benchmarks.overhead --files 20000 --rounds 3
    python -m benchmarks.overhead --executors 1 2 4 --workers 8 --files 200000 --rounds 3 --folder /dev/shm

The second one is the daemon's own limit, and how it grows with the number of executors. With --pipelined OCR has half of the
workers, and the other stages have the other half. --capacity slows the workers down to this rate, all together, as GPUs
would: does the daemon keep up with them? Prints images per second from the first image seen to the last one published, the
same for the middle 70 % of the images, which leaves out the start of the processes, and the CPU time for each image of the
daemon with its executors.

The bare loop reads each file, digests it, records it in SQLite (64 per commit, synchronous FULL) and writes a
sidecar: the minimum that any such program does.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
import time
from argparse import Namespace
from collections import defaultdict
from pathlib import Path

from benchmarks.harness import FAKES, TEMPORARY, Run, make_files, read_options, run_fakes, spread, work_folder
from daemon.monitoring.limits import IN_DAEMON

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


def configure(executors: int, options: Namespace) -> str:
    if not options.workers:
        return FAKES
    workers, capacity = options.workers, options.capacity
    half = max(1, workers // 2)
    segments = "".join(
        f'[[pipeline.segment]]\nstages = {stages}\ndevices = ["cpu"]\nworkers_per_device = {half}\n'
        for stages in (["ocr"], ["yolo", "clip", "blip"])
    )
    seconds = (half if options.pipelined else workers) / capacity if capacity else 0
    pace = f"[stages.blip.options]\nlatency_per_image_seconds = {seconds}\n" if capacity else ""
    return f"[pipeline]\nexecutors = {executors}\nworkers_per_device = {workers}\n{segments * options.pipelined}{FAKES}{pace}"


def main() -> None:
    options = read_options(
        __doc__,
        executors=[1],
        workers=0,
        pipelined=False,
        capacity=0.0,
        files=20_000,
        rounds=3,
        folder=TEMPORARY,
    )
    if options.executors != [1] and not options.workers:
        sys.exit("--executors divides the workers among processes: name their number, such as --workers 4")
    runs: dict[int, list[Run]] = defaultdict(list)
    bare: list[float] = []
    for number in range(options.rounds):
        for executors in sorted(options.executors, reverse=number % 2 == 1):
            with work_folder(options.folder) as folder:
                make_files(folder / "inbox", options.files, number)
                os.sync()  # otherwise each waits for the disk to write what the other one left
                if len(bare) == number:
                    bare.append(run_bare(folder / "inbox", folder))
                    print(f"round {number + 1}, bare loop: {bare[-1]:,.0f} images/s", flush=True)
                    os.sync()
                run = run_fakes(folder, configure(executors, options), metered=True)
            runs[executors].append(run)
            cpu = 1e6 * run.cpu_seconds.get(IN_DAEMON, 0.0) / options.files
            print(
                f"round {number + 1}, executors: {executors}, {run.whole:,.0f} images/s, middle {run.middle:,.0f}, "
                f"ratio {run.whole / bare[-1]:.3f}; CPU for an image: {cpu:.0f} µs",
                flush=True,
            )
    print(
        f"{options.files:,} files, {len(os.sched_getaffinity(0))} cores, median (range)\n  bare loop: {spread(bare)} images/s"
    )
    for executors, found in sorted(runs.items()):
        whole, middle = spread([run.whole for run in found]), spread([run.middle for run in found])
        ratios = spread([run.whole / each for run, each in zip(found, bare, strict=True)], 3)
        print(f"{executors:3} executors: {whole} images/s, middle {middle}, ratio {ratios}")


if __name__ == "__main__":
    main()
