"""Long work of SQLite that can be stopped while it runs."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator

STEPS = 20_000  # of SQLite between two checks whether to stop: some milliseconds

Stop = Callable[[], bool]  # whether to stop


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
