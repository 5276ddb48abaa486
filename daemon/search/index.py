"""The index of words: a SQLite file beside the ledger that follows its publications.

The number of a publication is the row of its entry, so the newest come first without sorting, and an entry is never
changed: an image that is published again gets another one, and the ledger no longer knows the old number. Any process may
write; whoever searches first brings the index up to date. It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from daemon.core.errors import LedgerDamaged, LedgerUnusable, SearchUnusable, VisiondError
from daemon.labels.store import LabelStore
from daemon.ledger import identity, publications
from daemon.ledger.records import Reader
from daemon.ledger.schema import WITH_NUMBERS, read_version
from daemon.ledger.soundness import DAMAGE, code_of, look_again
from daemon.ledger.statements import SQL as LEDGER_SQL
from daemon.ledger.statements import read_statements
from daemon.search import matrix
from daemon.search.entries import FIELDS, Document, make_entry
from daemon.search.evidence import Columns, Gathering
from daemon.search.query import Query
from daemon.system.ownership import hand_over, make_folder

VERSION = 6  # of the entries and their tables; an index of another version is made again
CHUNK = 512  # images in one transaction
RANKED = 10_000  # most matches that are ranked; beyond these, the newest come first
BUSY_SECONDS = 30.0  # wait for another process that writes
LOOK_SECONDS = 600.0  # between two counts of entries that are no longer shown
MOST_IDLE = 8  # connections
UNREAD = "-"  # the state of labels that could not be read
MOST_STALE = 1000  # entries that are no longer shown and stay, besides as many as are shown

SQL = read_statements("daemon.search", "search.sql")


class About(NamedTuple):
    """How far the index has come."""

    ledger: str
    start: int
    token: str
    place: int
    entries: int
    labels: str


class Index:
    """Words, marks and embeddings of all publications. Any thread may use it."""

    def __init__(self, folder: Path) -> None:
        """folder: of the index; made if there is none. Raises SearchUnusable."""
        self.folder = folder
        self._file = folder / "index.sqlite"
        self.evidence = Gathering(LabelStore(folder.parent))
        self.trouble = ""  # with the labels of people, when they were looked at last
        self._idle: list[tuple[int, sqlite3.Connection]] = []  # each with the inode of its file
        self._closed = False
        self._lock = threading.Lock()  # of the two above
        # when entries that are no longer shown were counted, in monotonic seconds
        self._looked_at = -LOOK_SECONDS
        with self.lend():
            pass

    def close(self) -> None:
        """Connections that other threads use are closed when they are done."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def catch_up(self, reader: Reader, go_on: Callable[[int], bool] = lambda place: True) -> int:
        """Add what was published since; returns how many images. Begins again when the ledger is another one, or
        an older one. go_on: called after each few hundred with the last number; false stops. Raises SearchUnusable."""
        added = 0
        self._drop_stale(reader)
        while (some := self._add_some(reader)) is not None:
            added += some
            if not go_on(self.about().place):
                return added
        self._follow_labels(reader)
        return added

    def _follow_labels(self, reader: Reader) -> None:
        """Measure the images again whose labels have changed. Labels that cannot be read are left for the next time."""
        self.trouble = ""
        try:
            state = self.evidence.labels.state()
            if self.about().labels == state:
                return
            with self.lend() as connection:
                changed = self.evidence.find_changed(connection)
            for start in range(0, len(changed), CHUNK):
                with self.lend() as connection, transaction(connection):
                    self.evidence.measure_again(connection, reader, changed[start : start + CHUNK])
            with self.lend() as connection:
                connection.execute(SQL["note_labels"], (state,))
        except (LedgerUnusable, LedgerDamaged) as error:
            self.trouble = str(error)

    def evidence_in(self, names: Sequence[str]) -> Columns:
        """names: of columns of `evidence`."""
        with self.lend() as connection:
            return Columns.read(connection, names)

    def about(self) -> About:
        with self.lend() as connection:
            return _about(connection)

    def newest(self, query: Query, before: int, limit: int) -> list[int]:
        """Entries that fit, newest first. before: only those with a lower number."""
        return self._numbers("newest", query.expression(), before, limit)

    def oldest(self, query: Query, after: int, limit: int) -> list[int]:
        """Entries that fit, oldest first. after: only those with a higher number."""
        return self._numbers("oldest", query.expression(), after, limit)

    def best(self, query: Query, limit: int) -> list[int]:
        """Entries that fit, best first; the newest first if there are more than RANKED."""
        if self.count(query, RANKED + 1) > RANKED:
            return self._numbers("newest", query.expression(), 1 << 62, limit)
        return self._numbers("best", query.expression(), limit)

    def count(self, query: Query, most: int) -> int:
        """How many entries fit, of which some may no longer be shown; counted up to `most`."""
        return self._numbers("count", query.expression(), most)[0]

    def matching(self, expression: str, after: int) -> tuple[About, NDArray[np.int64]]:
        """All entries with a higher number than `after` that fit, and how far the index had come then."""
        with self.lend() as connection:
            connection.execute("BEGIN")  # both from one state of the index
            try:
                about = _about(connection)
                [found] = connection.execute(SQL["matching"], (expression, after)).fetchone()
            finally:
                connection.execute("ROLLBACK")
        # One text in place of a million Python numbers: five times as fast.
        return about, np.fromstring(found or "", np.int64, sep=",")

    def matrix(self, maker: str) -> tuple[Path, int, int] | None:
        """The folder, rows and dim of a model's embeddings; None if there are none."""
        with self.lend() as connection:
            row = connection.execute(SQL["matrix"], (maker,)).fetchone()
        return (matrix.folder_of(self.folder, maker), row[1], row[0]) if row else None

    def matrices(self) -> dict[str, tuple[Path, int, int]]:
        """The same of every model that has embeddings."""
        with self.lend() as connection:
            rows = connection.execute(SQL["matrices"]).fetchall()
        return {maker: (matrix.folder_of(self.folder, maker), count, dim) for maker, dim, count in rows}

    def _numbers(self, statement: str, *parameters: object) -> list[int]:
        with self.lend() as connection:
            return [row[0] for row in connection.execute(SQL[statement], parameters)]

    def _add_some(self, reader: Reader) -> int | None:
        """Add one chunk; None if there was nothing to add."""
        about = self.about()
        with reader.lend() as ledger:  # nothing of the index in it: each names the trouble of its own file
            if self._is_current(about, ledger) and about.place >= publications.read_last(ledger):
                return None
        with self.lend() as connection, transaction(connection):
            about = _about(connection)  # another process may have been faster
            with reader.lend() as ledger:
                last, present = publications.read_last(ledger), identity.identity_of(ledger).ledger
                is_current = self._is_current(about, ledger)
                starts = publications.read_starts(ledger, about.start if is_current else 0)
            if not is_current:
                about = self._begin_again(connection, present)
            found, place = reader.published_after(about.place, CHUNK)
            whole = {number: record for number, record in found.items() if not record.damage}
            entries = [make_entry(number, record) for number, record in whole.items()]
            connection.executemany(SQL["add"], [_row(entry) for entry in entries])
            self._add_embeddings(connection, entries)
            labels = about.labels if self.evidence.add(connection, reader, whole) else UNREAD
            place = max(place, about.place) if place > about.place else max(last, about.place)
            seen = [start for start in starts if start.number <= place]
            start, token = (seen[-1].id, seen[-1].token) if seen else (about.start, about.token)
            added = (place, about.entries + len(entries), labels)
            connection.execute(SQL["note"], (about.ledger, start, token, *added))
        return len(entries)

    def _is_current(self, about: About, ledger: sqlite3.Connection) -> bool:
        """Whether all that the index has is from this ledger as it is now: not from another one, nor from
        one that a backup has replaced since."""
        # `about` was read first: what was published in between is behind it.
        if about.ledger != identity.identity_of(ledger).ledger or about.place > publications.read_last(
            ledger
        ):
            return False
        starts = publications.read_starts(ledger, about.start)
        if about.start:
            if not starts or (starts[0].id, starts[0].token) != (about.start, about.token):
                return False
            starts = starts[1:]
        return all(start.number >= about.place for start in starts)

    def _drop_stale(self, reader: Reader) -> None:
        """Begin again if most entries are no longer shown, as after a redo of all images. Looked at now and then."""
        if time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at, about = time.monotonic(), self.about()
        if about.entries > MOST_STALE:
            with reader.lend() as ledger:
                shown = ledger.execute(LEDGER_SQL["count_publications"]).fetchone()[0]
            if about.entries > 2 * shown + MOST_STALE:
                with self.lend() as connection, transaction(connection):
                    self._begin_again(connection, about.ledger)

    def _begin_again(self, connection: sqlite3.Connection, ledger: str) -> About:
        connection.execute("INSERT INTO entry (entry) VALUES ('delete-all')")
        connection.execute(SQL["drop_matrices"])
        for made in ("drop_evidence", "drop_duplicates", "drop_grouping"):
            connection.execute(SQL[made])
        about = About(ledger, 0, "", 0, 0, "")
        connection.execute(SQL["note"], about)
        return about

    def _add_embeddings(self, connection: sqlite3.Connection, entries: Iterable[Document]) -> None:
        made = [
            (each.maker, len(each.values), e.number, each.sharpness, each.values)
            for e in entries
            for each in e.embeddings.values()
        ]
        for (maker, dim), some in groupby(sorted(made, key=itemgetter(0, 1)), itemgetter(0, 1)):
            known = connection.execute(SQL["matrix"], (maker,)).fetchone()
            if not dim or (known and known[0] != dim):  # no model has two sizes
                continue
            rows, (*_, numbers, sharpness, embeddings) = known[1] if known else 0, zip(*some, strict=True)
            folder = matrix.folder_of(self.folder, maker)
            matrix.append(folder, rows, numbers, np.stack(embeddings), sharpness)
            connection.execute(SQL["note_matrix"], (maker, dim, rows + len(numbers)))

    @contextlib.contextmanager
    def lend(self) -> Iterator[sqlite3.Connection]:
        """A connection for this thread only. A file that is damaged is removed, to be made again. Raises SearchUnusable:
        errors of SQLite and of the disk, with the folder's name."""
        try:
            inode, connection = self._take() or self._open()
            try:
                yield connection
            finally:
                self._give_back(inode, connection)
        except VisiondError:  # of the ledger
            raise
        except (sqlite3.Error, OSError) as error:
            if self._is_useless(error):
                self._remove()
            trouble = SearchUnusable(
                f"the search index {self.folder} cannot be used: {error}. It may be deleted: it is made again from the ledger."
            )
            trouble.exit_status = os.EX_IOERR  # of its disk
            raise trouble from error

    def _is_useless(self, error: Exception) -> bool:
        """Whether the index has to be made again after this error: it is damaged, or of another version."""
        if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.OperationalError):
            return False
        try:
            return code_of(error) not in DAMAGE or look_again(self._file) or _is_of_words(error)
        except (sqlite3.DatabaseError, OSError):  # its disk fails now
            return False

    def _take(self) -> tuple[int, sqlite3.Connection] | None:
        inode = _inode_of(self._file)
        while True:
            with self._lock:
                if self._closed:
                    raise SearchUnusable("the search is being closed.")
                if not self._idle:
                    return None
                known, connection = self._idle.pop()
            if known == inode:
                return known, connection
            connection.close()  # somebody has deleted its file

    def _give_back(self, inode: int, connection: sqlite3.Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < MOST_IDLE:
                self._idle.append((inode, connection))
                return
        connection.close()

    def _open(self) -> tuple[int, sqlite3.Connection]:
        make_folder(self.folder)
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            if not self._is_useless(error):
                raise
            self._remove()  # the ledger has all of it
            return self._connect()

    def _connect(self) -> tuple[int, sqlite3.Connection]:
        if not self._file.exists():
            self._file.touch(0o600)
            hand_over(self._file)  # SQLite's other files get the same owner
        with contextlib.ExitStack() as undo:
            connection = sqlite3.connect(
                self._file, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS
            )
            undo.callback(connection.close)
            connection.execute("PRAGMA journal_mode = WAL")
            # a power failure may lose the last commits, and no more
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA cache_size = -16384")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError("it is of another version")
            if not version:
                with transaction(connection):
                    if not connection.execute("PRAGMA user_version").fetchone()[0]:
                        for statement in _statements(SQL["schema"]):
                            connection.execute(statement)
                        connection.execute(f"PRAGMA user_version = {VERSION}")
            _about(connection)
            undo.pop_all()
        return _inode_of(self._file), connection

    def _remove(self) -> None:
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_of_words(error: sqlite3.DatabaseError) -> bool:
    """Whether the tables of words are damaged, which SQLite's own check does not read."""
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_CORRUPT_VTAB


def _about(connection: sqlite3.Connection) -> About:
    return About(*connection.execute(SQL["about"]).fetchone())


def _inode_of(file: Path) -> int:
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return 0


def check_ledger(reader: Reader) -> None:
    """Raises SearchUnusable if the ledger is too old to be followed."""
    with reader.lend() as connection:
        if read_version(reader.path, connection) < WITH_NUMBERS:
            raise SearchUnusable(
                f"{reader.path} was written by an older visiond. Start the daemon once: it brings the ledger up to date."
            )


def _row(entry: Document) -> tuple[object, ...]:
    return (entry.number, *(entry.fields[name] for name in FIELDS), " ".join(sorted(entry.marks)))


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
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
