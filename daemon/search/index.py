"""The index of words: a SQLite file beside the ledger that follows its publications.

The number of a publication is the row of its entry, so the newest come first without sorting, and an entry is never
changed: an image that is published again gets another one, and the ledger no longer knows the old number. Any process may
write; whoever searches first brings the index up to date. It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from daemon.errors import VisiondError
from daemon.ledger import identity, publications
from daemon.ledger.records import Reader
from daemon.ledger.schema import WITH_NUMBERS, read_version
from daemon.ledger.statements import SQL as LEDGER_SQL
from daemon.ledger.statements import read_statements
from daemon.search import matrix
from daemon.search.entries import FIELDS, Entry, make_entry
from daemon.search.query import Query

VERSION = 1  # of the entries and their tables; an index of another version is made again
CHUNK = 512  # images in one transaction
RANKED = 10_000  # most matches that are ranked; beyond these, the newest come first
BUSY_SECONDS = 30.0  # wait for another process that writes
MOST_STALE = 1000  # entries that are no longer shown and stay, besides as many as are shown

SQL = read_statements("daemon.search", "search.sql")


class SearchUnusable(VisiondError):
    """The index cannot be used or made; the message says why."""


class About(NamedTuple):
    """How far the index has come."""

    ledger: str
    start: int
    token: str
    place: int
    entries: int


class Index:
    """Words, marks and embeddings of all publications. Any thread may use it."""

    def __init__(self, folder: Path) -> None:
        """folder: of the index; made if there is none. Raises SearchUnusable."""
        self.folder = folder
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._looked = False  # for entries that are no longer shown
        with self._named():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._prepare(self._connection())
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self.close()  # it is damaged, and the ledger has all of it
                self._remove()
                self._prepare(self._connection())

    def close(self) -> None:
        """No thread may be using it."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._local = threading.local()

    def catch_up(self, reader: Reader, go_on: Callable[[int], bool] = lambda place: True) -> int:
        """Add what was published since; returns how many images. Begins again when the ledger is another one, or
        an older one. go_on: called after each few hundred with the last number; false stops. Raises SearchUnusable."""
        added = 0
        with self._named():
            self._drop_stale(reader)
            while (some := self._add_some(reader)) is not None:
                added += some
                if not go_on(self.about().place):
                    break
        return added

    def about(self) -> About:
        return About(*self._connection().execute(SQL["about"]).fetchone())

    def newest(self, query: Query, before: int, limit: int) -> list[int]:
        """Entries that fit, newest first. before: only those with a lower number."""
        return self._numbers("newest", query.expression(), before, limit)

    def best(self, query: Query, limit: int) -> list[int]:
        """Entries that fit, best first; the newest first if there are more than RANKED."""
        if self.count(query, RANKED + 1) > RANKED:
            return self._numbers("newest", query.expression(), 1 << 62, limit)
        return self._numbers("best", query.expression(), limit)

    def count(self, query: Query, most: int) -> int:
        """How many entries fit, of which some may no longer be shown; counted up to `most`."""
        return self._numbers("count", query.expression(), most)[0]

    def matching(self, query: Query) -> NDArray[np.int64]:
        """All entries that fit, ascending."""
        return np.array(self._numbers("matching", query.expression()), np.int64)

    def matrix(self, maker: str) -> tuple[Path, int, int] | None:
        """The folder, rows and dim of a model's embeddings; None if there are none."""
        row = self._connection().execute(SQL["matrix"], (maker,)).fetchone()
        return (matrix.folder_of(self.folder, maker), row[1], row[0]) if row else None

    def makers(self) -> dict[str, int]:
        """Of the embeddings: how many there are of each model."""
        return {row[0]: row[2] for row in self._connection().execute(SQL["matrices"])}

    def _numbers(self, statement: str, *parameters: object) -> list[int]:
        with self._named():
            return [row[0] for row in self._connection().execute(SQL[statement], parameters)]

    def _add_some(self, reader: Reader) -> int | None:
        """Add one chunk; None if there was nothing to add."""
        connection = self._connection()
        with reader.lend() as ledger:
            last = publications.read_last(ledger)
            if self._is_current(about := self.about(), ledger, last) and about.place >= last:
                return None
        with _transaction(connection):
            about = self.about()  # another process may have been faster
            with reader.lend() as ledger:
                if not self._is_current(about, ledger, last):
                    about = self._begin_again(connection, identity.identity_of(ledger).ledger)
                starts = publications.read_starts(ledger, about.start)
            found, place = reader.published_after(about.place, CHUNK)
            entries = [make_entry(number, record) for number, record in found.items() if not record.damage]
            connection.executemany(SQL["add"], [_row(entry) for entry in entries])
            self._add_embeddings(connection, entries)
            seen = [start for start in starts if start.number <= place]
            start, token = (seen[-1].id, seen[-1].token) if seen else (about.start, about.token)
            place = max(place, about.place) if found or place > about.place else last
            connection.execute(SQL["note"], (about.ledger, start, token, place, about.entries + len(entries)))
        return len(entries)

    def _is_current(self, about: About, ledger: sqlite3.Connection, last: int) -> bool:
        """Whether all that the index has is from this ledger as it is now: not from another one, nor from
        one that a backup has replaced since."""
        if about.ledger != identity.identity_of(ledger).ledger or about.place > last:
            return False
        starts = publications.read_starts(ledger, about.start)
        if about.start:
            if not starts or (starts[0].id, starts[0].token) != (about.start, about.token):
                return False
            starts = starts[1:]
        return all(start.number >= about.place for start in starts)

    def _drop_stale(self, reader: Reader) -> None:
        """Begin again if most entries are no longer shown, as after a redo of all images. Looked at once."""
        if self._looked:
            return
        self._looked, about = True, self.about()
        if about.entries > MOST_STALE:
            with reader.lend() as ledger:
                shown = ledger.execute(LEDGER_SQL["count_publications"]).fetchone()[0]
            if about.entries > 2 * shown + MOST_STALE:
                with _transaction(self._connection()):
                    self._begin_again(self._connection(), about.ledger)

    def _begin_again(self, connection: sqlite3.Connection, ledger: str) -> About:
        connection.execute("INSERT INTO entry (entry) VALUES ('delete-all')")
        connection.execute(SQL["drop_matrices"])
        about = About(ledger, 0, "", 0, 0)
        connection.execute(SQL["note"], about)
        return about

    def _add_embeddings(self, connection: sqlite3.Connection, entries: Iterable[Entry]) -> None:
        def kind(entry: Entry) -> tuple[str, int]:
            return entry.maker, 0 if entry.embedding is None else len(entry.embedding)

        for (maker, dim), some in groupby(sorted(entries, key=kind), kind):
            known = connection.execute(SQL["matrix"], (maker,)).fetchone()
            if not dim or (known and known[0] != dim):  # no model has two sizes
                continue
            rows, mine = known[1] if known else 0, list(some)
            embeddings = np.stack([each.embedding for each in mine if each.embedding is not None])
            numbers = [each.number for each in mine]
            matrix.append(matrix.folder_of(self.folder, maker), rows, numbers, embeddings)
            connection.execute(SQL["note_matrix"], (maker, dim, rows + len(mine)))

    def _prepare(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError("it is of another version")
        with _transaction(connection):
            if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                for statement in _statements(SQL["schema"]):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {VERSION}")
        self.about()

    def _connection(self) -> sqlite3.Connection:
        """This thread's."""
        found: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if found is None:
            found = self._local.connection = sqlite3.connect(
                self.folder / "index.sqlite",
                isolation_level=None,
                check_same_thread=False,
                timeout=BUSY_SECONDS,
            )
            self._connections.append(found)
            found.execute("PRAGMA journal_mode = WAL")
            found.execute(
                "PRAGMA synchronous = NORMAL"
            )  # a power failure may lose the last commits, and no more
            found.execute("PRAGMA cache_size = -32768")
        return found

    def _remove(self) -> None:
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turn errors of SQLite and of the disk into one that names the folder."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise SearchUnusable(
                f"the search index {self.folder} cannot be used: {error}. It may be deleted: it is made again from the ledger."
            ) from error


def check_ledger(reader: Reader) -> None:
    """Raises SearchUnusable if the ledger is too old to be followed."""
    with reader.lend() as connection:
        if read_version(reader.path, connection) < WITH_NUMBERS:
            raise SearchUnusable(
                f"{reader.path} was written by an older visiond. Start the daemon once: it brings the ledger up to date."
            )


def _row(entry: Entry) -> tuple[object, ...]:
    return (entry.number, *(entry.fields[name] for name in FIELDS), " ".join(sorted(entry.marks)))


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> Sequence[str]:
    without = re.sub(r"--.*", "", script)
    return [statement for statement in without.split(";") if statement.strip()]
