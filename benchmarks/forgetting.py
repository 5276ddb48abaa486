"""Measures how skipped files that are gone are forgotten, and what requests to the ledger wait for meanwhile.

    python -m benchmarks.forgetting --rows 5000000
    python -m benchmarks.forgetting --rows 500000 --there 500000

Makes a ledger with this many skipped files, of which `--there` are in the inbox and all others were deleted. Prints the
time of all and of a group of rows; and how long the admission of a file took, one every 10 ms, before and beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import TEMPORARY, read_options, work_folder
from daemon.config.sections import Inbox
from daemon.core.jobs import File, Version
from daemon.inbox.watcher import Watcher
from daemon.ledger.ledger import Ledger
from daemon.ledger.records import Reader
from daemon.maintenance import forgetting
from daemon.monitoring.metrics import Metrics

ROW = (
    "INSERT INTO image (inbox, path, device, inode, size, mtime_ns, ctime_ns, priority, status, seen_at, digest, reason, "
    "detail, finished_at) VALUES (1, ?, 0, ?, 9, ?, ?, 0, 3, 1e9, ?, 'not-an-image', 'it is no image', 1e9)"
)
IN_A_FOLDER = 1000
INTERVAL_SECONDS = 0.01


def make_rows(count: int) -> Iterator[tuple[Any, ...]]:
    for number in range(count):
        time_ns = 10**18 + number * 10**6
        yield path_of(number), number, time_ns, time_ns, number.to_bytes(32)


def path_of(number: int) -> bytes:
    return b"folder-%05d/notes-%07d.txt" % (number // IN_A_FOLDER, number)


def make_files(inbox: Path, rows: int, count: int) -> None:
    folders = [inbox / f"folder-{number:05d}" for number in range(-(-rows // IN_A_FOLDER))]
    for folder in folders:
        folder.mkdir()
    for number in range(count):
        (inbox / path_of(number).decode()).touch()
    time.sleep(0.1)  # file systems stamp files by a coarse clock
    for folder in folders:  # something was deleted from it after it was made
        (folder / "deleted").touch()
        (folder / "deleted").unlink()


async def ask(ledger: Ledger, seconds: list[float], numbers: Iterator[int]) -> None:
    """Admit files until cancelled."""
    while True:
        began, number = time.perf_counter(), next(numbers)
        await ledger.admit([File(2, b"%d.jpg" % number, Version(number, 1, 1, 1))])
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(max(0.0, INTERVAL_SECONDS - seconds[-1]))


async def measure(folder: Path, rows: int, there: int, alone_seconds: float) -> None:
    inbox, groups = folder / "inbox", list[float]()
    inbox.mkdir()
    ledger = Ledger(folder / "state" / "ledger.sqlite")
    await ledger.register([(inbox, 0), (folder / "other", 0)], [])
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.executemany(ROW, make_rows(rows))
    make_files(inbox, rows, there)
    reader = Reader(ledger.path)
    watcher = Watcher({1: Inbox(path=inbox)}, reader, 60.0, Metrics())
    watcher.folders[1].first_scanned_at = 1.0  # without a scan, which admits what it finds
    real, numbers = forgetting._forget_some, iter(range(10**9))

    async def timed(*of: Any) -> None:
        began = time.perf_counter()
        await real(*of)
        groups.append(time.perf_counter() - began)

    forgetting._forget_some = timed  # type: ignore[assignment]
    for beside in (False, True):
        waits: list[float] = []
        asking = asyncio.create_task(ask(ledger, waits, numbers))
        began = time.perf_counter()
        if beside:
            done = await forgetting.forget_skipped(ledger, watcher.folders, Metrics().counts, lambda: False)
            print(f"{done.sentence()} in {time.perf_counter() - began:.1f} s; a group: {describe(groups)}")
        else:
            await asyncio.sleep(alone_seconds)
        asking.cancel()
        print(f"a file is admitted in {describe(waits)} {'beside it' if beside else 'alone'}")
    reader.close()
    ledger.close()


def describe(seconds: Sequence[float]) -> str:
    ordered = sorted(1000 * each for each in seconds)
    at = [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99, 1.0)]
    return f"{at[0]:.1f} ms (median), {at[1]:.1f} ms (p99), {at[2]:.1f} ms (longest of {len(ordered):,})"


def main() -> None:
    # there: files that were not deleted; alone_seconds: of admissions without anything beside them
    options = read_options(__doc__, rows=1_000_000, there=0, alone_seconds=20.0, folder=TEMPORARY)
    with work_folder(options.folder) as folder:
        asyncio.run(measure(folder, options.rows, options.there, options.alone_seconds))


if __name__ == "__main__":
    main()
