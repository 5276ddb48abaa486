"""Long reads of the ledger during the daemon's work, in a separate thread and connection. They can be stopped."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from daemon.ledger.reading import Stop, stopping
from daemon.ledger.schema import add_views, trouble_named

T = TypeVar("T")


@contextlib.contextmanager
def opened_for_reading(path: Path, stop: Stop) -> Iterator[sqlite3.Connection]:
    """A read-only connection for the calling thread. Raises Stopped, LedgerDamaged, LedgerUnusable."""
    with trouble_named(path):
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        with contextlib.closing(connection), stopping(connection, stop):
            add_views(path, connection)
            yield connection


async def run_in_background(function: Callable[..., T], *arguments: object) -> T:
    """Call `function(*arguments, stop)` in a separate thread. When this is cancelled, `stop`
    returns true from then on, and nothing waits for the thread, not even the end of the process."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()
    stop = threading.Event()

    def work() -> None:
        try:
            answer.set_result(function(*arguments, stop.is_set))
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            answer.set_exception(error)

    threading.Thread(target=work, name="background", daemon=True).start()
    try:
        return await asyncio.wrap_future(answer)
    finally:
        stop.set()
