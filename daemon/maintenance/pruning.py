"""Finds rows of the ledger that are no longer needed, and results of bytes that no version has; removes them in small steps.
And gives the free pages of the ledger's file back to the disk.

ledger.sql says under `is_spare` which rows these are. They are found over a separate connection, while the
daemon works, and checked again in the transaction that removes them.
"""

from __future__ import annotations

import itertools
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from daemon.core.errors import NotWritable
from daemon.core.jobs import JobStatus
from daemon.ledger.ledger import Ledger
from daemon.ledger.reading import Stop, stopping
from daemon.ledger.statements import SQL, run_rows
from daemon.ledger.writer import Alone
from daemon.maintenance.background import opened_for_reading, run_in_background

T = TypeVar("T")

CHUNK = 256  # rows, or digests, in one transaction
PORTION = 100_000  # of them in memory
RESULTS, CONTENTS = "results", "contents"
ROWS_SHARE = 0.5  # of the time: the other half is for bytes that no version has
CONTENT_BYTES = 100  # of a row of `content`, about
# Shrink only if this much of the ledger's file is free.
FREE_SHARE, LEAST_FREE_BYTES = 0.25, 16 << 20
CHECKPOINT_MILLISECONDS, BUSY_MILLISECONDS = 100, 5000


class Amount(msgspec.Struct):
    """How many rows of a kind, and about how many bytes of the ledger."""

    rows: int = 0
    bytes: int = 0

    def add(self, rows: int, bytes: int) -> None:
        self.rows += rows
        self.bytes += bytes


Amounts = dict[str, Amount]
# what was found or removed so far, and about which share of the ledger was searched
Step = Callable[[Amounts, float], None]


def kind_of(status: JobStatus) -> str:
    return status.name if status is JobStatus.GONE else f"replaced {status.name}"


KINDS = (
    *map(kind_of, (JobStatus.GONE, JobStatus.DONE, JobStatus.FAILED, JobStatus.SKIPPED)),
    RESULTS,
    CONTENTS,
)


def survey(path: Path, before: float, stop: Stop, step: Step = lambda found, share: None) -> Amounts:
    """What `prune` would remove. before: Unix seconds, the end of what is old. step: called now and then.

    Raises Stopped, LedgerDamaged, LedgerUnusable.
    """
    found: Amounts = {kind: Amount() for kind in KINDS}
    with opened_for_reading(path, stop) as connection:
        connection.execute("BEGIN")  # rows and results as of one moment
        last = connection.execute(SQL["last_id"]).fetchone()[0]
        for rows in _chunks(connection.execute(SQL["spare"], {"before": before, "after": 0, "limit": -1})):
            for _, status, size in rows:
                found[kind_of(JobStatus(status))].add(1, size)
            step(found, share_of_rows(rows[-1][0], last))
        for digests in _chunks(
            connection.execute(SQL["unreferenced"], {"before": before, "after": b"", "limit": -1})
        ):
            sizes = run_rows(connection, "sizes_of_results", digests)
            found[RESULTS].add(len(sizes), sum(size for (size,) in sizes))
            found[CONTENTS].add(len(digests), CONTENT_BYTES * len(digests))
            step(found, share_of_digests(digests[-1][0]))
    return found


def share_of_rows(number: int, last: int) -> float:
    """Rows are searched first, in the order of their numbers."""
    return ROWS_SHARE * number / max(number, last)


def share_of_digests(digest: bytes) -> float:
    """Bytes are searched last, in the order of their digests, which are spread evenly."""
    return ROWS_SHARE + (1 - ROWS_SHARE) * int.from_bytes(digest[:4]) / 2**32


async def prune(
    ledger: Ledger,
    before: float,
    forget: Callable[[JobStatus], None] = lambda status: None,
    step: Step = lambda removed, share: None,
) -> Amounts:
    """Remove them, a few at a time, so that other requests to the ledger come in between. May be cancelled at any time.

    forget: called for each removed row. step: called after each few. Raises LedgerDamaged, LedgerUnusable.
    """
    removed: Amounts = {kind: Amount() for kind in KINDS}
    last = await ledger.run(lambda connection: connection.execute(SQL["last_id"]).fetchone()[0])
    async for rows in find_rows(ledger.path, "spare", 0, before=before):
        sizes = {number: size for number, _, size in rows}
        for number, status in await ledger.run(partial(_prune, ids=list(sizes), before=before)):
            removed[kind_of(JobStatus(status))].add(1, sizes[number])
            forget(JobStatus(status))
        step(removed, share_of_rows(rows[-1][0], last))
    try:
        # From now on the ledger notes all bytes that get a version again while unreferenced ones are searched for.
        await ledger.run(lambda connection: setattr(ledger.results, "touched", set()))
        async for digests in find_rows(ledger.path, "unreferenced", b"", before=0.0):
            results, contents = await ledger.run(partial(_drop, digests=digests, ledger=ledger))
            removed[RESULTS].add(len(results), sum(size for (size,) in results))
            removed[CONTENTS].add(contents, CONTENT_BYTES * contents)
            step(removed, share_of_digests(digests[-1][0]))
    finally:
        ledger.results.touched = None
    return removed


async def find_rows(
    path: Path, statement: str, after: object, **parameters: object
) -> AsyncIterator[list[Any]]:
    """The rows of a statement in chunks, in the order of their first column; few in memory at a time. They are read over a
    connection and in a thread of their own."""
    while portion := await run_in_background(
        _read, path, statement, {"after": after, "limit": PORTION} | parameters
    ):
        for chunk in _chunks(portion):
            yield chunk
        after = portion[-1][0]


def _read(path: Path, statement: str, parameters: dict[str, object], stop: Stop) -> list[Any]:
    with opened_for_reading(path, stop) as connection:
        return connection.execute(SQL[statement], parameters).fetchall()


def _prune(connection: sqlite3.Connection, ids: list[int], before: float) -> list[tuple[int, int]]:
    parameters = {"ids": msgspec.json.encode(ids).decode(), "before": before}
    removed = [tuple(row) for row in connection.execute(SQL["prune"], parameters).fetchall()]
    drop_references(connection, [number for number, _ in removed])
    return removed


def drop_references(connection: sqlite3.Connection, removed: Sequence[int]) -> None:
    """Remove what other tables have of these images, whose rows are gone. Runs in the writing thread."""
    gone = msgspec.json.encode(removed).decode()
    for table in ("looks", "publications", "lost", "renamed"):
        connection.execute(SQL[f"drop_pruned_{table}"], (gone,))


def _drop(
    connection: sqlite3.Connection, digests: list[tuple[bytes]], ledger: Ledger
) -> tuple[list[tuple[int]], int]:
    if ledger.results.touched is None:  # pruning was cancelled, so this is no longer known
        return [], 0
    free = [(digest,) for (digest,) in digests if digest not in ledger.results.touched]
    return run_rows(connection, "drop_results", free), len(run_rows(connection, "drop_contents", free))


def _chunks(rows: Iterable[T]) -> Iterator[list[T]]:
    rows = iter(rows)
    while chunk := list(itertools.islice(rows, CHUNK)):
        yield chunk


async def shrink(ledger: Ledger, is_disturbed: Stop) -> str:
    """Write the file again without its free pages, if that is worth it; returns what was done, in a few words. is_disturbed:
    whether others need the ledger's thread. Raises Stopped, NotWritable, LedgerUnusable."""
    folder = ledger.path.parent
    free, pages, page_bytes = await ledger.run(_measure)
    if free * page_bytes < LEAST_FREE_BYTES or free < FREE_SHARE * pages:
        return f"not needed: only {free * page_bytes >> 20} of {pages * page_bytes >> 20} MiB are free"
    # Room for a copy beside the ledger, and for the copy back through its -wal.
    wanted = 2 * (pages - free) * page_bytes
    if shutil.disk_usage(folder).free < wanted:
        raise NotWritable(f"{folder} has no room for a copy of the ledger; {wanted >> 20} MiB are needed.")
    left = threading.Event()
    try:
        await ledger.run(Alone(partial(_vacuum, stop=lambda: left.is_set() or is_disturbed())))
    finally:
        left.set()
    return f"{free * page_bytes >> 20} MiB given back to the disk"


def _measure(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """The ledger's free pages, all its pages, and the bytes of one."""
    names = ("freelist_count", "page_count", "page_size")
    free, pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
    return free, pages, size


def _vacuum(connection: sqlite3.Connection, stop: Stop) -> None:
    """Write the ledger's file again without its free pages. It may be stopped while the copy is made;
    the copy back, at the disk's speed, may not."""
    with stopping(connection, stop):
        connection.execute("VACUUM")
    connection.execute(f"PRAGMA busy_timeout = {CHECKPOINT_MILLISECONDS}")  # do not wait for readers
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}")
