"""Measures how the daemon's own rate grows with the number of stations: four fake stages, no GPU.

    python -m benchmarks.stations --stations 1 2 4 --workers 8 --files 200000 --rounds 3 --folder /dev/shm

With --pipelined OCR has half of the workers, and the other stages have the other half. --capacity slows
the workers down to this rate, all together, as GPUs would: does the daemon keep up with them?

Each round has new files, and first runs the bare loop of benchmarks/overhead.py over them. Prints images per
second from the first image seen to the last one published, the same for the middle half of the images, which
leaves out the start of the processes, and the CPU time for each image of the daemon's process and of all
stations together.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from benchmarks.overhead import FAKES, make_files, run_bare, spread

TICK = os.sysconf("SC_CLK_TCK")
STATION = b"daemon.pipeline.child"


class Run(NamedTuple):
    whole: float  # images per second
    middle: float  # images per second
    own: float  # seconds of CPU time
    stations: float  # seconds of CPU time


def run_daemon(folder: Path, stations: int, workers: int, *, pipelined: bool, capacity: float = 0.0) -> Run:
    """capacity: images per second of all workers; 0: they take no time."""
    config = folder / "daemon.toml"
    half = max(1, workers // 2)
    segments = "".join(
        f'[[pipeline.segment]]\nstages = {stages}\ndevices = ["cpu"]\nworkers_per_device = {half}\n'
        for stages in (["ocr"], ["yolo", "clip", "blip"])
    )
    captioners = half if pipelined else workers
    pace = f"[stages.blip.options]\nlatency_per_image_seconds = {captioners / capacity}\n" if capacity else ""
    config.write_text(
        f'[[inbox]]\npath = "{folder}/inbox"\nsettle_seconds = 0\n[http]\nlisten = ""\n[log]\nlevel = "error"\n'
        f"[pipeline]\nstations = {stations}\nworkers_per_device = {workers}\n{segments if pipelined else ''}{FAKES}{pace}"
    )
    command = [sys.executable, "-P", "-m", "daemon", "run", "--once", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        seconds: dict[int, float] = {}
        while process.poll() is None:
            seconds |= cpu_seconds(process.pid)
            time.sleep(0.05)
    assert process.returncode == 0, f"the daemon ended with {process.returncode}"
    files = sum(1 for _ in os.scandir(folder / "inbox"))
    whole, middle = rates_of(folder / "state" / "ledger.sqlite", files)
    own = seconds.pop(process.pid)
    return Run(whole, middle, own, sum(seconds.values()))


def rates_of(ledger: Path, files: int) -> tuple[float, float]:
    """Images per second of the whole run and of its middle half."""
    with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
        query = "SELECT seen_at, finished_at FROM image WHERE status = 1 AND emitted = 1 ORDER BY finished_at"
        rows = connection.execute(query).fetchall()
    assert len(rows) == files, f"{len(rows)} rows for {files} files"
    first, third = rows[files // 4][1], rows[files * 3 // 4][1]
    return files / (rows[-1][1] - min(seen for seen, _ in rows)), files / 2 / (third - first)


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
    parser.add_argument("--pipelined", action="store_true")
    parser.add_argument(
        "--capacity", type=float, default=0.0, help="images per second of all workers together"
    )
    parser.add_argument("--files", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    runs: dict[int, list[Run]] = defaultdict(list)
    bare: list[float] = []
    for number in range(options.rounds):
        for stations in sorted(options.stations, reverse=number % 2 == 1):
            folder = Path(tempfile.mkdtemp(prefix="visiond-stations-", dir=options.folder))
            try:
                make_files(folder / "inbox", options.files, number)
                if len(bare) == number:
                    bare.append(run_bare(folder / "inbox", folder))
                    print(f"round {number + 1}, bare loop: {bare[-1]:,.0f} images/s", flush=True)
                run = run_daemon(
                    folder,
                    stations,
                    options.workers,
                    pipelined=options.pipelined,
                    capacity=options.capacity,
                )
            finally:
                shutil.rmtree(folder)
            runs[stations].append(run)
            each = 1e6 / options.files
            print(
                f"round {number + 1}, {stations} stations: {run.whole:,.0f} images/s, middle {run.middle:,.0f}; CPU "
                f"for an image: daemon {run.own * each:.0f} µs, stations {run.stations * each:.0f} µs",
                flush=True,
            )
    print(
        f"{options.files:,} files, {options.workers} workers, {len(os.sched_getaffinity(0))} cores, median (range)\n"
        f"  bare loop: {spread(bare)}"
    )
    for stations, found in sorted(runs.items()):
        whole, middle = spread([run.whole for run in found]), spread([run.middle for run in found])
        print(f"{stations:3} stations: {whole}, middle {middle}")


if __name__ == "__main__":
    main()
