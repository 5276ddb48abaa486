"""Connections that read are lent to one thread, and never closed while it uses them."""

from __future__ import annotations

import sqlite3
import sys
import threading
from pathlib import Path

import anyio
import pytest

from daemon.core.errors import LedgerDamaged, LedgerUnusable
from daemon.ledger.ledger import Ledger
from daemon.ledger.reading import Connections, ReaderClosed

pytestmark = pytest.mark.anyio

COUNT = "SELECT COUNT(*) FROM image"

# A shared connection that one thread closes under another ends this with SIGSEGV in about half of all tries.
CLOSE_UNDER_THREADS = """
import sys, threading
from pathlib import Path
from daemon.ledger.reading import ReaderClosed
from daemon.ledger.records import Reader
from daemon.ledger.statements import run_rows

def read(reader, began):
    paths = [(b"%d.jpg" % number,) for number in range(512)]
    try:
        while True:
            with reader.lend() as connection:
                run_rows(connection, "versions", paths, 1)
            began.set()
    except ReaderClosed:
        pass

for _ in range(40):
    reader, began = Reader(Path(sys.argv[1])), [threading.Event() for _ in range(4)]
    threads = [threading.Thread(target=read, args=(reader, event)) for event in began]
    for thread in threads:
        thread.start()
    for event in began:
        event.wait()
    reader.close()
    for thread in threads:
        thread.join()
"""


async def test_closing_under_threads_that_read_ends_no_process(ledger: Ledger) -> None:
    run = await anyio.run_process([sys.executable, "-c", CLOSE_UNDER_THREADS, str(ledger.path)], check=False)
    assert run.returncode == 0


async def test_a_lent_connection_is_closed_when_it_is_given_back(ledger: Ledger) -> None:
    connections = Connections(ledger.path)
    with connections.lend() as connection:
        connections.close()
        assert connection.execute(COUNT).fetchone()[0] == 0
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute(COUNT)


async def test_nothing_is_lent_once_they_are_closed(ledger: Ledger) -> None:
    connections = Connections(ledger.path)
    connections.close()
    with pytest.raises(ReaderClosed), connections.lend():
        pass


async def test_two_threads_at_once_have_a_connection_each_and_one_after_the_other_the_same(
    ledger: Ledger,
) -> None:
    connections = Connections(ledger.path)
    seen: list[sqlite3.Connection] = []

    def borrow() -> None:
        with connections.lend() as connection:
            seen.append(connection)

    with connections.lend() as connection:
        thread = threading.Thread(target=borrow)
        thread.start()
        thread.join()
    borrow()
    assert seen[0] is not connection
    assert seen[1] is connection
    connections.close()


async def test_a_connection_that_cannot_be_opened_is_not_left_open(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"this is no database" * 100)
    with pytest.raises(LedgerDamaged, match="not a database"), Connections(tmp_path / "ledger.sqlite").lend():
        pass


async def test_a_lack_of_memory_while_the_ledger_is_read_is_waited_for(ledger: Ledger) -> None:
    """It is how Python reports SQLITE_NOMEM."""
    connections = Connections(ledger.path)
    with pytest.raises(LedgerUnusable, match="too little memory"), connections.lend():
        raise MemoryError
    connections.close()
