"""Keeps what people say about images, by the digest of the bytes: in a file of its own beside the ledger, so that no redo,
repair or new version of a file touches it."""

from __future__ import annotations

import contextlib
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from daemon.config.state import LABELS, closed_to_others
from daemon.core.errors import LedgerDamaged, LedgerUnusable
from daemon.core.labels import Kind, Label, LookUp, Value, decode
from daemon.system.ownership import hand_over

BUSY_SECONDS = 30.0
COUNT = "SELECT COUNT(*) FROM label"
SELECT = "SELECT * FROM label LEFT JOIN split USING (digest)"
# Of classes, those of other classifiers stay.
KEEP = """
INSERT INTO label VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    value = iif(kind = 'classes', json_patch(value, excluded.value), excluded.value),
    origin = excluded.origin, made_at = excluded.made_at;
"""
SCHEMA = """
CREATE TABLE IF NOT EXISTS label (
    digest BLOB NOT NULL,  -- SHA-256 of the image's file
    kind TEXT NOT NULL,
    value TEXT NOT NULL,   -- JSON
    origin TEXT NOT NULL,
    made_at REAL NOT NULL, -- Unix seconds
    PRIMARY KEY (digest, kind)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS split (
    digest BLOB PRIMARY KEY,
    held_out INTEGER NOT NULL  -- 1: no training learns from the image, 0: it is to learn from, as a file of labels says
) WITHOUT ROWID;
"""


def stamp_of(labels: Mapping[Kind, Label]) -> int:
    """Of what people say about an image; 0 if they say nothing."""
    found = 0
    for kind in sorted(labels):
        found = _stamp(found, kind, labels[kind].made_at)
    return found


def _stamp(before: int, kind: str, made_at: float) -> int:
    return zlib.crc32(f"{kind} {made_at!r}".encode(), before) or 1


class LabelCount(NamedTuple):
    """Labels of one kind and origin. empty: those that say that there is nothing. newest: Unix seconds."""

    kind: str
    origin: str
    images: int
    empty: int
    newest: float


class LabelStore:
    """A later import of the same kind replaces what is said about an image; of classes, only of the same classifier."""

    def __init__(self, state: Path) -> None:
        """state: the folder of the ledger."""
        self.path = state / LABELS

    def keep(
        self,
        said: Iterable[tuple[bytes, Kind, Value, str]],
        held_out: Mapping[bytes, bool] = MappingProxyType({}),
    ) -> int:
        """said: digest, kind, value and origin of each; all or nothing. held_out: as of Label, by digest. Returns how many
        replace others. Raises LedgerUnusable, LedgerDamaged."""
        now = time.time()
        # In the order of the table, which is twice as fast.
        rows = [
            (digest, kind, msgspec.json.encode(value).decode(), origin, now)
            for digest, kind, value, origin in sorted(said, key=lambda each: each[:2])
        ]
        with closed_to_others():
            if not self.path.exists():
                self.path.touch(0o640)
                hand_over(self.path)
            with self._open() as connection, self._named(), connection:
                # Nothing is written before the end, so that others can read until then.
                connection.execute("PRAGMA cache_spill = OFF")
                [before] = connection.execute(COUNT).fetchone()
                connection.executemany(KEEP, rows)
                connection.executemany("REPLACE INTO split VALUES (?, ?)", held_out.items())
                [after] = connection.execute(COUNT).fetchone()
                return int(before + len(rows) - after)

    @contextlib.contextmanager
    def lookup(self) -> Iterator[LookUp]:
        """A function that finds what is said about the image with a digest. Raises LedgerUnusable, LedgerDamaged."""
        with self._reading() as connection:

            def find(digest: bytes) -> dict[Kind, Label]:
                with self._named():
                    rows = connection.execute(f"{SELECT} WHERE digest = ?", (digest,)).fetchall()
                return {kind: label for _, kind, label in map(self._decode, rows)}

            yield find

    def of_kind(self, kind: Kind) -> Iterator[tuple[bytes, Label]]:
        """By digest."""
        with self._reading() as connection, self._named():
            rows = connection.execute(f"{SELECT} WHERE kind = ? ORDER BY digest", (kind,))
            for row in rows:
                digest, _, label = self._decode(row)
                yield digest, label

    def state(self) -> str:
        """Another one after every change. Empty without labels. The file is not opened for that: closing it would release the
        locks by which other threads read it."""
        try:
            status = self.path.stat()
            return f"{status.st_ino} {status.st_size} {status.st_ctime_ns}"
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise LedgerUnusable(f"{self.path} cannot be used: {error}") from error

    def stamps(self) -> dict[bytes, int]:
        """Of each labelled digest a number that changes with its labels, as `stamp_of` has it."""
        found: dict[bytes, int] = {}
        with self._reading() as connection, self._named():
            for digest, kind, made_at in connection.execute(
                "SELECT digest, kind, made_at FROM label ORDER BY digest, kind"
            ):
                found[digest] = _stamp(found.get(digest, 0), kind, made_at)
        return found

    def tallies(self) -> list[LabelCount]:
        with self._reading() as connection, self._named():
            rows = connection.execute(
                "SELECT kind, origin, COUNT(*), SUM(value IN ('[]', '\"\"')), MAX(made_at) FROM label "
                "GROUP BY kind, origin ORDER BY kind, origin"
            )
            return [LabelCount(*row) for row in rows]

    def forget(self, origin: str) -> int:
        """Returns how many."""
        if not self.path.exists():
            return 0
        with self._open() as connection, self._named(), connection:
            forgotten = connection.execute("DELETE FROM label WHERE origin = ?", (origin,)).rowcount
            connection.execute("DELETE FROM split WHERE digest NOT IN (SELECT digest FROM label)")
            return forgotten

    def _decode(self, row: tuple[bytes, str, str, str, float, int | None]) -> tuple[bytes, Kind, Label]:
        digest, kind, value, origin, made_at, held_out = row
        try:
            said = None if held_out is None else bool(held_out)
            return digest, Kind(kind), Label(decode(Kind(kind), value), origin, made_at, said)
        except (ValueError, msgspec.MsgspecError) as error:
            raise LedgerDamaged(f"{self.path} is damaged: {error}. Import the labels again.") from error

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """An empty database if there are no labels yet."""
        if self.path.exists():
            with self._open() as connection:
                yield connection
        else:
            with contextlib.closing(sqlite3.connect(":memory:")) as connection:
                connection.executescript(SCHEMA)
                yield connection

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """The file, which must exist. Not only to be read: SQLite would then refuse to undo what a killed command has left half
        written."""
        address = f"{self.path.absolute().as_uri()}?mode=rw"
        with self._named():
            connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS)
        with contextlib.closing(connection):
            with self._named():
                connection.execute("PRAGMA synchronous = EXTRA")
                connection.executescript(SCHEMA)
            yield connection

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Raises LedgerUnusable or LedgerDamaged for an error of SQLite."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise LedgerUnusable(f"{self.path} cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise LedgerDamaged(
                f"{self.path} is damaged: {error}. Move it away, and import the labels again."
            ) from error
