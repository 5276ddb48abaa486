"""Measures a large backlog: memory while many files wait, and the time to the first result with a million pending rows.

python -m benchmarks.backlog --files 200000 --rows 1000000
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from pathlib import Path

import psutil

from benchmarks.harness import FAKES, TEMPORARY, fake_daemon, make_files, read_options, wait_for, work_folder
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.measure.meter import anonymous_bytes

# Slow, so that the backlog stays.
SLOW = FAKES.replace('"fake"\n', '"fake"\noptions = { latency_seconds = 2.0 }\n', 1)


def measure_memory(folder: Path, files: int) -> None:
    """Anonymous memory of the daemon at the start and while more and more files wait."""
    make_files(folder / "inbox", files, 0)
    with fake_daemon(folder, settings=SLOW) as daemon:
        wait_for(daemon, "done", 64)
        process = psutil.Process(daemon.process.pid)
        readings = [anonymous_bytes(process) >> 20]
        for share in (0.25, 0.5, 0.75, 0.95):
            pending = wait_for(daemon, "pending", int(files * share)).pending
            readings.append(anonymous_bytes(process) >> 20)
    print(
        f"{files:,} files waiting ({pending:,} pending at the last reading): {', '.join(map(str, readings))} MiB, "
        f"spread {max(readings) - min(readings)} MiB"
    )


def measure_start(folder: Path, rows: int) -> None:
    """Seconds from the start of the process to the first result, with a ledger full of pending rows."""
    make_files(folder / "inbox", 256, 0)

    async def register() -> None:
        ledger = Ledger(folder / "state" / "ledger.sqlite")
        await ledger.register([(folder / "inbox", 0)], [Model("ocr", "x", "")])
        ledger.close()

    asyncio.run(register())
    columns = "inbox, path, device, inode, size, mtime_ns, ctime_ns, priority, status, seen_at"
    insert = f"INSERT INTO image ({columns}) VALUES (1, ?, 0, ?, ?, ?, ?, 0, 0, ?)"
    absent = ((b"absent/%07d.jpg" % n, n, 2000, n, n, time.time()) for n in range(rows))
    existing = [
        (path.name.encode(), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns, 0.0)
        for path in sorted((folder / "inbox").iterdir())
        for s in [path.stat()]
    ]
    with contextlib.closing(sqlite3.connect(folder / "state" / "ledger.sqlite")) as connection, connection:
        connection.executemany(insert, existing)
        connection.executemany(insert, absent)
    started = time.monotonic()
    with fake_daemon(folder) as daemon:
        wait_for(daemon, "done", 1)
        seconds = time.monotonic() - started
    print(f"{rows:,} rows pending: first result {seconds:.2f} s after the start of the process")


def main() -> None:
    options = read_options(__doc__, files=200_000, rows=1_000_000, folder=TEMPORARY)
    for measure, size in ((measure_start, options.rows), (measure_memory, options.files)):
        with work_folder(options.folder) as folder:
            measure(folder, size)


if __name__ == "__main__":
    main()
