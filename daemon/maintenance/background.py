"""Long reads of the ledger during the daemon's work, in a separate thread and connection.
They can be stopped."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

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
    loop, stop = asyncio.get_running_loop(), threading.Event()
    answer: asyncio.Future[Any] = loop.create_future()

    def resolve(result: object, error: BaseException | None) -> None:
        if not answer.done():
            if error:
                answer.set_exception(error)
            else:
                answer.set_result(result)

    def work() -> None:
        result, raised = None, None
        try:
            result = function(*arguments, stop.is_set)
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits for the answer
            loop.call_soon_threadsafe(resolve, result, raised)

    threading.Thread(target=work, name="background", daemon=True).start()
    try:
        return await answer  # type: ignore[no-any-return]
    finally:
        stop.set()
