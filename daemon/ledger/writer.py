"""The thread that writes the ledger. It commits in groups: all requests that came
during the last commit go into the next one, so many requests share an fsync.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from daemon.core.errors import LedgerDamaged, VisiondError
from daemon.ledger.schema import explain, unusable
from daemon.ledger.soundness import DAMAGE, code_of

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], Any]

GROUP = 256  # requests in one transaction, at most


class Alone(NamedTuple):
    """Work that runs between two transactions."""

    work: Work


class Writer:
    """Runs requests over one connection, in a separate thread. Called from the event loop."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, committed: Callable[[float], None]
    ) -> None:
        """committed: called after each commit that wrote something, with its seconds."""
        self._connection = connection
        self._path = path
        self._committed = committed
        self._damage: LedgerDamaged | None = None
        self._requests: queue.SimpleQueue[tuple[Work | Alone, asyncio.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish all requests. The connection stays open."""
        self._requests.put(None)
        self._thread.join()

    async def ask(self, work: Callable[[sqlite3.Connection], T] | Alone) -> T:
        """The answer, once it is durable. Raises LedgerUnusable if the disk cannot store it; then nothing was done."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._requests.put((work, future))
        return await future

    def _write(self) -> None:
        """Take all requests, run them in one transaction, commit, answer."""
        while (request := self._requests.get()) is not None:
            if isinstance(request[0], Alone):
                _answer([request], [self._attempt(request[0])])
                continue
            group = [request]
            while len(group) < GROUP and not self._requests.empty():
                following = self._requests.get()
                if following is None or isinstance(following[0], Alone):
                    self._requests.put(following)
                    break
                group.append(following)
            works, changes = [work for work, _ in group], self._connection.total_changes
            started = time.perf_counter()
            try:
                answers = self._transact(works)
            except Exception:  # noqa: BLE001 - of SQLite, or a bug in a request
                # One of them fails: each gets its own transaction, so that only that one fails.
                answers = list(map(self._attempt, works))
            if self._connection.total_changes > changes:
                self._committed(time.perf_counter() - started)
            _answer(group, answers)

    def _transact(self, works: Sequence[Any]) -> list[Any]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            answers = [work(self._connection) for work in works]
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        return answers

    def _attempt(self, work: Work | Alone) -> Any:
        try:
            return work.work(self._connection) if isinstance(work, Alone) else self._transact([work])[0]
        except (sqlite3.OperationalError, MemoryError) as error:  # it may be temporary, as a full disk is
            return unusable(self._path, error)
        except sqlite3.DatabaseError as error:  # damage, or a page that the disk did not deliver
            return self._explain(error) if code_of(error) in DAMAGE else error
        except Exception as error:  # noqa: BLE001 - the caller gets it
            return error

    def _explain(self, error: sqlite3.DatabaseError) -> VisiondError:
        """Damage is looked for until it is found, not once for each request."""
        if self._damage is None:
            found = explain(self._path, error)
            if not isinstance(found, LedgerDamaged):
                return found
            self._damage = found
        return self._damage


def _answer(group: list[tuple[Any, asyncio.Future[Any]]], answers: list[Any]) -> None:
    """Resolve the group's futures, with one call into the event loop."""

    def resolve() -> None:
        for (_, future), answer in zip(group, answers, strict=True):
            if not future.done():
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits for the answer
        group[0][1].get_loop().call_soon_threadsafe(resolve)
