"""Connections that read the ledger, lent to one thread at a time; and how long work on them is stopped.

SQLite crashes the process if a connection is closed, or used by another thread, while a thread runs a
statement on it. So a connection that is lent is only closed by its borrower: when that is done, if the others
have been closed by then.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from daemon.core.errors import VisiondError
from daemon.ledger.schema import (
    add_views,
    explain,
    set_factories,
    trouble_named,
)
from daemon.ledger.soundness import DAMAGE, DISK, check_integrity, code_of

STEPS = 20_000  # of SQLite between two checks whether to stop: some milliseconds

Stop = Callable[[], bool]  # whether to stop


class ReaderClosed(VisiondError):
    """A thread that was left behind tries to read. Nothing waits for its answer."""


class Connections:
    """Read-only connections to one ledger: as many as there are threads that read at the same moment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        self._lock = threading.Lock()  # of the two above; never held while SQLite works

    @contextlib.contextmanager
    def lend(self) -> Iterator[sqlite3.Connection]:
        """A connection for this thread only. Raises ReaderClosed, LedgerDamaged, LedgerUnusable,
        LedgerTooNew."""
        with self._lock:
            if self._closed:
                raise ReaderClosed("the ledger is being closed.")
            connection = self._idle.pop() if self._idle else None
        is_kept = True
        if connection is None:
            with trouble_named(self._path):
                connection, has_views = self._open()
            is_kept = not has_views  # which a migration makes wrong
        try:
            yield connection
        except (sqlite3.DatabaseError, MemoryError) as error:
            is_kept = False  # what it has in memory may be wrong
            connection.close()
            is_ours = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY  # not the disk's
            if code_of(error) in DAMAGE + DISK and not is_ours:
                raise explain(self._path, error) from error
            raise
        finally:
            with self._lock:
                is_kept = is_kept and not self._closed
                if is_kept:
                    self._idle.append(connection)
            if not is_kept:
                connection.close()

    def close(self) -> None:
        """Close idle connections now, and lent ones when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _open(self) -> tuple[sqlite3.Connection, bool]:
        """A new connection, and whether it has views."""
        with contextlib.ExitStack() as undo:
            address = f"{self._path.absolute().as_uri()}?mode=ro"
            # Several threads use it, one after another.
            connection = sqlite3.connect(address, uri=True, check_same_thread=False)
            undo.callback(connection.close)
            set_factories(connection)
            has_views = add_views(self._path, connection)
            undo.pop_all()
        return connection, has_views


class Stopped(Exception):
    """It was stopped before it was done."""


@contextlib.contextmanager
def stopping(connection: sqlite3.Connection, stop: Stop) -> Iterator[None]:
    """Within the context, work on this connection ends early with Stopped as soon as `stop` returns true."""
    connection.set_progress_handler(stop, STEPS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
            raise Stopped from error
        raise
    finally:
        connection.set_progress_handler(None, 0)


def check_whole_file(connection: sqlite3.Connection, go_on: Callable[[], bool]) -> None:
    """Read the whole file, or as much as `go_on` allows. Raises sqlite3.DatabaseError as check_integrity."""
    with contextlib.suppress(Stopped), stopping(connection, lambda: not go_on()):
        check_integrity(connection)
