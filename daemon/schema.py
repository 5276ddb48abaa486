"""The ledger's file: whether it is one, whether it is whole, and that its tables are those of this program.

Migrations go forward only: an older file is brought up to date when the daemon opens it, a newer one is refused untouched.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from daemon.errors import SCARCE, ConfigError, LedgerDamaged, LedgerTooNew, LedgerUnusable, VisiondError, find_scarcity
from daemon.hints import command
from daemon.statements import SQL

APPLICATION_ID = 0x56495344  # "VISD"
# The first brings schema 1 to schema 2, and so on; append only. `schema` in ledger.sql is what comes out of all of them.
MIGRATIONS = [
    "ALTER TABLE image ADD COLUMN deaths INTEGER NOT NULL DEFAULT 0;",
    "ALTER TABLE content ADD COLUMN pages INTEGER NOT NULL DEFAULT 1;",
]

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TROUBLE = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_BUSY)


def newest() -> int:
    """The schema that this program writes."""
    return 1 + len(MIGRATIONS)


def connect(path: Path) -> sqlite3.Connection:
    """Open a ledger for writing: create it if there is none, migrate it if it is older.

    Raises LedgerDamaged, LedgerUnusable, LedgerTooNew, ConfigError when it is another program's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=256)
    except sqlite3.OperationalError as error:
        raise explain(path, error) from error
    connection.row_factory = sqlite3.Row
    try:
        version = read_version(path, connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -65536")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        if version < newest():
            steps = "".join(MIGRATIONS[version - 1 :]) if version else SQL["schema"]
            connection.executescript(
                f"BEGIN IMMEDIATE; {steps} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {newest()}; COMMIT;"
            )
    except sqlite3.DatabaseError as error:
        connection.close()
        raise explain(path, error) from error
    except (LedgerTooNew, ConfigError):
        connection.close()
        raise
    return connection


def read_version(path: Path, connection: sqlite3.Connection) -> int:
    """The schema of a file; 0: it has none yet. Raises ConfigError when it is another program's, LedgerTooNew."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    owner = connection.execute("PRAGMA application_id").fetchone()[0]
    if connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0] == 0:
        return 0
    if owner != APPLICATION_ID:
        raise ConfigError([f"{path} is a database of another program. Name another folder in [state] path."])
    if version > newest():
        raise LedgerTooNew(
            f"{path} was written by a newer visiond (schema {version}, this one knows {newest()}). "
            "Upgrade visiond, or name another folder in [state] path."
        )
    return version


@contextlib.contextmanager
def trouble_named(path: Path) -> Iterator[None]:
    """What SQLite raises for the sake of the file, wherever it is read, as an error of ours; a defect passes."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if _code(error) in _DAMAGE + _TROUBLE:
            raise explain(path, error) from error
        raise


def explain(path: Path, error: sqlite3.DatabaseError) -> VisiondError:
    """Why a file cannot be used as a ledger: LedgerUnusable where it may well be whole, else LedgerDamaged."""
    if _code(error) in _TROUBLE:
        return unusable(path, error)
    return damaged(path, error)


def _code(error: sqlite3.DatabaseError) -> int:
    """The primary result code of SQLite; 0 for what Python's module raises by itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def unusable(path: Path, error: sqlite3.DatabaseError) -> LedgerUnusable:
    if _code(error) == sqlite3.SQLITE_CANTOPEN and (lack := find_scarcity()):
        trouble = LedgerUnusable(f"{path} cannot be used: {SCARCE[lack]}.")
        trouble.errno = lack
        return trouble
    return LedgerUnusable(f"{path} cannot be used: {error}. Is it a file that may be read and written, on a disk with room?")


def damaged(path: Path, found: object) -> LedgerDamaged:
    return LedgerDamaged(
        f"{path} cannot be used: {found}. Stop the daemon and restore a backup, or run `{command('repair')}`: "
        "it makes the ledger anew from the sidecars, and no model has to run again."
    )
