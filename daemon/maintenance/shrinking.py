"""Gives the free pages of the ledger's file back to the disk."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from functools import partial

from daemon.core.errors import NotWritable
from daemon.ledger.ledger import Ledger
from daemon.ledger.reading import Stop, stopping
from daemon.ledger.writer import Alone

# Shrink only if this much of the ledger's file is free.
FREE_SHARE, LEAST_FREE_BYTES = 0.25, 16 << 20
CHECKPOINT_MILLISECONDS, BUSY_MILLISECONDS = 100, 5000


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
