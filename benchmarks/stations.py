"""Measures how the daemon's own rate grows with the number of stations: four fake stages, no GPU.

    python -m benchmarks.stations --stations 1 2 4 --workers 8 --files 40000 --rounds 3 --folder /dev/shm

Each round has new files. Prints images per second from the first image seen to the last one published, and
the CPU time for each image of the daemon's process and of all stations together.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.overhead import FAKES, make_files

TICK = os.sysconf("SC_CLK_TCK")
STATION = b"daemon.stations.child"


def run_daemon(folder: Path, stations: int, workers: int) -> tuple[float, float, float]:
    """Images per second, and the CPU time in seconds of the daemon's process and of its stations."""
    config = folder / "daemon.toml"
    config.write_text(
        f'[[inbox]]\npath = "{folder}/inbox"\nsettle_seconds = 0\n[http]\nlisten = ""\n[log]\nlevel = "error"\n'
        f"[pipeline]\nstations = {stations}\nworkers_per_device = {workers}\n{FAKES}"
    )
    command = [sys.executable, "-P", "-m", "daemon", "run", "--once", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        seconds: dict[int, float] = {}
        while process.poll() is None:
            seconds |= cpu_seconds(process.pid)
            time.sleep(0.05)
    assert process.returncode == 0, f"the daemon ended with {process.returncode}"
    ledger = sqlite3.connect(f"file:{folder}/state/ledger.sqlite?mode=ro", uri=True)
    query = "SELECT COUNT(*), MAX(finished_at) - MIN(seen_at) FROM image WHERE status = 1 AND emitted = 1"
    count, elapsed = ledger.execute(query).fetchone()
    ledger.close()
    files = sum(1 for _ in os.scandir(folder / "inbox"))
    assert count == files, f"{count} rows for {files} files"
    own = seconds.pop(process.pid)
    return count / elapsed, own, sum(seconds.values())


def cpu_seconds(pid: int) -> dict[int, float]:
    """Of this process and of its stations, by process id."""
    found = {}
    for each in [pid, *children(pid)]:
        try:
            command = Path(f"/proc/{each}/cmdline").read_bytes()
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if each == pid or STATION in command:
            found[each] = (int(fields[11]) + int(fields[12])) / TICK
    return found


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stations", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--files", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    rates: dict[int, list[float]] = defaultdict(list)
    for number in range(options.rounds):
        for stations in sorted(options.stations, reverse=number % 2 == 1):
            folder = Path(tempfile.mkdtemp(prefix="visiond-stations-", dir=options.folder))
            try:
                make_files(folder / "inbox", options.files, number)
                rate, own, others = run_daemon(folder, stations, options.workers)
            finally:
                shutil.rmtree(folder)
            rates[stations].append(rate)
            each = 1e6 / options.files
            print(
                f"round {number + 1}, {stations} stations: {rate:,.0f} images/s; CPU for an image: "
                f"daemon {own * each:.0f} µs, stations {others * each:.0f} µs",
                flush=True,
            )
    print(
        f"{options.files:,} files, {options.workers} workers, {len(os.sched_getaffinity(0))} cores, median (range)"
    )
    for stations, found in sorted(rates.items()):
        print(
            f"{stations:3} stations: {statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f})"
        )


if __name__ == "__main__":
    main()
