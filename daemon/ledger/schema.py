"""Opens the ledger's file: checks that it is a ledger and whole, and that it has the tables of this program.

Migrations go forward only: an older file is migrated when the daemon opens it, a newer one is refused and left untouched.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from daemon.core.errors import ConfigError, LedgerDamaged, LedgerTooNew, LedgerUnusable, VisiondError
from daemon.core.hints import command
from daemon.ledger.soundness import DAMAGE, DISK, code_of, find_altered_tables, find_fault, look_again
from daemon.ledger.statements import SQL
from daemon.system.log import print_line
from daemon.system.scarcity import AWAY, SCARCE, find_scarcity
from daemon.system.systemd import Notifier

STEPS = 200_000  # instructions of SQLite between two checks of signals and the clock
EXTEND_SECONDS = 600.0  # that systemd waits for the next message of a migration, or for the models after it
DURATION = "this takes about a minute for each million images"
APPLICATION_ID = 0x56495344  # "VISD"
# The first migrates schema 1 to schema 2, and so on; append only. `schema` in ledger.sql is the result of all of them.
MIGRATIONS = [
    "ALTER TABLE image ADD COLUMN deaths INTEGER NOT NULL DEFAULT 0;",
    """
    ALTER TABLE content ADD COLUMN pages INTEGER NOT NULL DEFAULT 1;
    ALTER TABLE content ADD COLUMN checksum INTEGER;
    ALTER TABLE result ADD COLUMN checksum INTEGER;
    ALTER TABLE image ADD COLUMN checksum INTEGER;
    CREATE TABLE meta (id TEXT NOT NULL, made_at TEXT NOT NULL);
    INSERT INTO meta VALUES (lower(hex(randomblob(16))), strftime('%Y-%m-%dT%H:%M:%SZ', 'now'));
    """,
    """
    CREATE TABLE outbox (
        sequence INTEGER PRIMARY KEY AUTOINCREMENT,
        image INTEGER NOT NULL REFERENCES image (id)
    );
    CREATE TABLE sink (name TEXT PRIMARY KEY, place INTEGER NOT NULL, succeeded_at REAL) WITHOUT ROWID;
    CREATE INDEX outbox_image ON outbox (image);
    """,
    """
    CREATE TABLE look (
        image INTEGER NOT NULL REFERENCES image (id),
        name TEXT NOT NULL,
        not_before REAL,
        attempts INTEGER NOT NULL DEFAULT 0,
        deaths INTEGER NOT NULL DEFAULT 0,
        model INTEGER REFERENCES model (id),
        reason TEXT,
        detail TEXT,
        checksum INTEGER,
        PRIMARY KEY (image, name)
    ) WITHOUT ROWID;
    CREATE INDEX waiting ON look (name, not_before, image) WHERE not_before IS NOT NULL;
    """,
    """
    ALTER TABLE model ADD COLUMN is_current INTEGER NOT NULL DEFAULT 0;
    CREATE INDEX made ON image (models) WHERE status = 1 AND models IS NOT NULL;
    """,
    # What sinks do not have yet keeps its order behind all that was published before: the places move with it.
    """
    CREATE TABLE publication (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        image INTEGER NOT NULL UNIQUE REFERENCES image (id)
    );
    CREATE TABLE start (token TEXT NOT NULL, number INTEGER NOT NULL);
    INSERT INTO publication (image) SELECT id FROM image
    WHERE (status IN (1, 2) AND (emitted = 1 OR not_before IS finished_at) OR status = 0 AND finished_at IS NOT NULL)
    AND NOT EXISTS (SELECT 1 FROM outbox WHERE outbox.image = image.id) ORDER BY id;
    CREATE TEMP TABLE earlier AS SELECT
        COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'publication'), 0) AS numbers,
        COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'outbox'), 0) AS sequences;
    INSERT OR REPLACE INTO publication (number, image) SELECT sequence + numbers, image FROM outbox, earlier ORDER BY sequence;
    UPDATE sink SET place = place + (SELECT numbers FROM earlier);
    DROP TABLE outbox;
    DELETE FROM sqlite_sequence WHERE name = 'publication';
    INSERT INTO sqlite_sequence (name, seq) SELECT 'publication', numbers + sequences FROM earlier;
    DROP TABLE earlier;
    """,
    "CREATE TABLE lost (image INTEGER PRIMARY KEY REFERENCES image (id));",
    "ALTER TABLE inbox ADD COLUMN marker BLOB NOT NULL DEFAULT x'';",
    # Contents get ids in the order of their first results. The index is made after most rows are inserted, so that SQLite sorts
    # them once instead of changing pages all over the index. Damaged pages that the old visiond perhaps never read must not
    # stop the migration (NOT INDEXED, OR IGNORE) or hide contents from it (DO UPDATE).
    """
    ALTER TABLE content RENAME TO old_content;
    ALTER TABLE result RENAME TO old_result;
    CREATE TABLE content (
        id INTEGER PRIMARY KEY,
        digest BLOB NOT NULL,
        format TEXT NOT NULL,
        width INTEGER NOT NULL,
        height INTEGER NOT NULL,
        pages INTEGER NOT NULL DEFAULT 1,
        checksum INTEGER
    );
    CREATE TABLE result (
        id INTEGER PRIMARY KEY,
        content INTEGER NOT NULL REFERENCES content (id),
        model INTEGER NOT NULL REFERENCES model (id),
        payload BLOB NOT NULL,
        seconds REAL NOT NULL,
        checksum INTEGER,
        UNIQUE (content, model)
    );
    INSERT INTO content (digest, format, width, height, pages, checksum)
    SELECT numbered.digest, COALESCE(format, ''), COALESCE(width, 0), COALESCE(height, 0), COALESCE(pages, 1), checksum
    FROM (SELECT digest, MIN(rowid) AS first FROM old_result NOT INDEXED GROUP BY digest) AS numbered
    LEFT JOIN old_content ON old_content.digest = numbered.digest ORDER BY first;
    CREATE UNIQUE INDEX bytes ON content (digest);
    INSERT INTO content (digest, format, width, height, pages, checksum)
    SELECT digest, format, width, height, pages, checksum FROM old_content WHERE TRUE
    ON CONFLICT (digest) DO UPDATE SET format = excluded.format, width = excluded.width, height = excluded.height,
        pages = excluded.pages, checksum = excluded.checksum WHERE content.format = '';
    INSERT OR IGNORE INTO result (content, model, payload, seconds, checksum)
    SELECT content.id, model, payload, seconds, old_result.checksum
    FROM old_result CROSS JOIN content ON content.digest = old_result.digest ORDER BY old_result.rowid;
    DROP TABLE old_content;
    DROP TABLE old_result;
    """,
    "CREATE INDEX failures ON image (id) WHERE status = 2 AND location IS NOT NULL;",
    """
    CREATE TABLE renamed (
        image INTEGER NOT NULL REFERENCES image (id),
        path BLOB NOT NULL,
        PRIMARY KEY (image, path)
    ) WITHOUT ROWID;
    ALTER TABLE publication ADD COLUMN told INTEGER;
    CREATE INDEX files ON image (inode, mtime_ns) WHERE location IS NULL;
    CREATE INDEX told ON publication (told) WHERE told IS NOT NULL;
    CREATE INDEX former ON renamed (path);
    """,
    "ALTER TABLE model ADD COLUMN name TEXT NOT NULL DEFAULT '';",
    "ALTER TABLE model RENAME COLUMN name TO provenance; UPDATE model SET provenance = '';",
]
WITH_CHECKSUMS = 3  # the first schema with checksums and an id
WITH_OUTBOX = 4  # the first schema with tables for sinks
WITH_LOOKS = 5  # the first schema with second looks
WITH_NUMBERS = 7  # the first schema that numbers publications
# The first schema that knows which files a redo could not read; models are current since schema 6.
WITH_LOST = 8
WITH_ORDER = 10  # the first schema whose results are in the order in which they were made
WITH_PROVENANCE = 14  # the first schema that knows what its models are
ADDED = (  # columns that a table got later, and the first schema that has them
    ("content", "1 AS pages, NULL AS checksum", WITH_CHECKSUMS),
    ("result", "NULL AS checksum", WITH_CHECKSUMS),
    ("image", "NULL AS checksum", WITH_CHECKSUMS),
    ("content", "digest AS id", WITH_ORDER),
    ("result", "rowid AS id, digest AS content", WITH_ORDER),
    ("model", "'' AS provenance", WITH_PROVENANCE),
)
WITHOUT_LOOKS = (
    "CREATE TEMP TABLE look (image INTEGER, name TEXT, not_before REAL, model INTEGER, reason TEXT, detail TEXT, "
    "checksum INTEGER);"
)


def newest() -> int:
    """The number of the schema that this program writes."""
    return 1 + len(MIGRATIONS)


def add_views(path: Path, connection: sqlite3.Connection) -> bool:
    """If the ledger has an older schema, let this connection read it through views, as if it had the columns that were
    added later. Returns whether it has; a migration makes the views wrong. Raises ConfigError, LedgerTooNew."""
    version = read_version(path, connection)
    if not 0 < version < newest():
        return False
    added: dict[str, str] = {}
    for table, columns, first in ADDED:
        if version < first:
            added[table] = f"{added.get(table, '*')}, {columns}"
    views = (
        f"CREATE TEMP VIEW {table} AS SELECT {columns} FROM main.{table};" for table, columns in added.items()
    )
    connection.executescript("".join(views) + (WITHOUT_LOOKS if version < WITH_LOOKS else ""))
    return True


def connect(path: Path, id: str = "") -> sqlite3.Connection:
    """Open a ledger for writing: create it if there is none, migrate it if it is older. id: for a ledger that has none yet.

    Raises LedgerDamaged, LedgerUnusable, LedgerTooNew, and ConfigError when the file is another program's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.ExitStack() as undo:
            connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, cached_statements=256
            )
            undo.callback(connection.close)
            set_factories(connection)
            version = read_version(path, connection)
            # Check before anything is written.
            if version and (fault := find_fault(connection, current=version == newest())):
                raise damaged(path, fault)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA cache_size = -65536")
            connection.execute("PRAGMA wal_autocheckpoint = 4000")
            if version < newest():
                _migrate(path, connection, version, id)
            undo.pop_all()
            return connection
    except sqlite3.DatabaseError as error:
        if code_of(error) == sqlite3.SQLITE_INTERRUPT:  # by a signal's handler, in `_step_in`
            raise KeyboardInterrupt from error
        raise explain(path, error) from error


def _migrate(path: Path, connection: sqlite3.Connection, version: int, id: str) -> None:
    """Give a ledger of this schema the tables of this program; version: 0: it has none. Raises LedgerUnusable."""
    if 0 < version < WITH_ORDER:
        _prepare_to_rewrite(path, version, connection)
    if version:
        connection.set_progress_handler(_step_in(Notifier()), STEPS)
    steps = "".join(MIGRATIONS[version - 1 :]) if version else SQL["schema"]
    steps += f"UPDATE meta SET id = '{id}';" if id and version < WITH_CHECKSUMS else ""
    connection.executescript(
        f"BEGIN IMMEDIATE; {steps} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {newest()}; COMMIT; "
        "PRAGMA wal_checkpoint(TRUNCATE);"
    )
    connection.set_progress_handler(None, 0)


def check_room(path: Path, version: int) -> None:
    """Whether the disk has room for a migration that writes all results again. Raises LedgerUnusable."""
    size, wal = path.stat().st_size, Path(f"{path}-wal")
    remains = wal.stat().st_size if wal.exists() else 0  # of a killed migration; SQLite overwrites them
    wanted, free = 2 * size, shutil.disk_usage(path.parent).free + remains  # the new tables, and the -wal
    if free < wanted:
        raise LedgerUnusable(
            f"{path} cannot be migrated from schema {version} to {newest()}: this needs {(wanted >> 20) + 1} MiB of free "
            f"space on its disk, and {free >> 20} MiB are free. Free some space and start again. The ledger is unchanged."
        )


def _prepare_to_rewrite(path: Path, version: int, connection: sqlite3.Connection) -> None:
    """Before a migration that writes all results again. Raises LedgerUnusable."""
    check_room(path, version)
    size = f"{path.stat().st_size >> 20} MiB"
    print_line(f"Migrating the ledger {path} from schema {version} to {newest()} ({size}); {DURATION}.")
    connection.execute("PRAGMA secure_delete = OFF")  # or SQLite overwrites the old tables with zeros


def _step_in(notifier: Notifier) -> Callable[[], int]:
    """Return a function that SQLite calls during a migration. It asks systemd to wait longer. Python handles signals in it, so
    a stop signal takes effect at once."""
    extended_at = -math.inf

    def step() -> int:
        nonlocal extended_at
        if time.monotonic() > extended_at + EXTEND_SECONDS / 4:
            notifier.starting("migrating the ledger", EXTEND_SECONDS)
            extended_at = time.monotonic()
        return 0  # go on

    return step


def keep_temporary_files(folder: Path) -> None:
    """Let SQLite make temporary files in this folder, such as the copy of VACUUM, also in processes that this one starts.
    Call it while no other thread uses SQLite."""
    # SQLite reads the variable when Python imports it, which is before the configuration is read.
    os.environ["SQLITE_TMPDIR"] = str(folder)
    statement = "PRAGMA temp_store_directory = '{}'".format(str(folder).replace("'", "''"))
    # SQLite takes only UTF-8 names; else it goes on with /var/tmp.
    with (
        contextlib.closing(sqlite3.connect(":memory:")) as connection,
        contextlib.suppress(UnicodeEncodeError),
    ):
        connection.execute(statement)


def set_factories(connection: sqlite3.Connection) -> None:
    """Return rows with named columns. Read text also if a flipped bit made it invalid: its checksum shows that."""
    connection.row_factory = sqlite3.Row
    connection.text_factory = lambda data: data.decode(errors="replace")


def read_version(path: Path, connection: sqlite3.Connection) -> int:
    """The schema of a file; 0 if it has none yet. Raises ConfigError when the file is another program's, LedgerTooNew."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    owner = connection.execute("PRAGMA application_id").fetchone()[0]
    try:
        tables = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0]
    except UnicodeDecodeError as error:  # SQLite's message quotes a damaged name, which is no longer UTF-8
        damage = sqlite3.DatabaseError("its list of tables is damaged")
        damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise damage from error
    if tables == 0:
        return 0
    if owner != APPLICATION_ID:
        raise ConfigError([f"{path} is a database of another program. Name another folder in [state] path."])
    if version > newest():
        raise LedgerTooNew(
            f"{path} was written by a newer visiond (schema {version}, this one knows {newest()}). "
            "Upgrade visiond, or name another folder in [state] path."
        )
    return version


# Errors in reading other files in the folder.
_UNREADABLE = (
    AWAY | SCARCE.keys() | {errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
)


@contextlib.contextmanager
def trouble_named(path: Path) -> Iterator[None]:
    """Turn errors of SQLite about the ledger, and of the system about files in its folder,
    into errors of visiond. Errors that are defects of the program pass unchanged."""
    try:
        yield
    except (sqlite3.DatabaseError, UnicodeDecodeError, MemoryError) as error:
        if code_of(error) in DAMAGE + DISK:
            raise explain(path, error) from error
        if fault := _find_altered_tables(path):  # it has no such column, or one that is no longer UTF-8
            raise damaged(path, fault) from error
        raise
    except OSError as error:
        named = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
        if error.errno in _UNREADABLE and named and Path(named).parent == path.parent:
            raise unusable(Path(named), error) from error
        raise


def _find_altered_tables(path: Path) -> str:
    """After an error: empty when the ledger's tables are as visiond makes them, or cannot be read."""
    with contextlib.suppress(sqlite3.DatabaseError, VisiondError):
        address = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            set_factories(connection)
            if read_version(path, connection) == newest():
                return find_altered_tables(connection)
    return ""


def explain(path: Path, error: Exception) -> VisiondError:
    """Why a file cannot be used as a ledger: LedgerUnusable if its disk fails now, or did a moment ago; else LedgerDamaged."""
    if code_of(error) in DISK:
        return unusable(path, error)
    if code_of(error) in DAMAGE:
        try:
            if not look_again(path):
                return unusable(
                    path, OSError(errno.EIO, "its disk failed, and a second reading found nothing wrong")
                )
        except (OSError, sqlite3.DatabaseError) as trouble:
            return unusable(path, trouble)
    return damaged(path, error)


def unusable(path: Path, error: Exception) -> LedgerUnusable:
    if (
        isinstance(error, sqlite3.DatabaseError)
        and code_of(error) == sqlite3.SQLITE_CANTOPEN
        and (lack := find_scarcity())
    ):
        trouble = LedgerUnusable(f"{path} cannot be used: {SCARCE[lack]}.")
        trouble.errno = lack
        return trouble
    cause = error.strerror if isinstance(error, OSError) else str(error) or "there is too little memory"
    return LedgerUnusable(f"{path} cannot be used: {cause}. Check its permissions and the room on its disk.")


def ledger_of(connection: sqlite3.Connection) -> Path:
    """The file of a connection."""
    return Path(connection.execute("PRAGMA database_list").fetchone()["file"])


def damaged(path: Path, found: object) -> LedgerDamaged:
    return LedgerDamaged(
        f"{path} cannot be used: {found}. Stop the daemon and restore a backup, or run `{command('repair')}`: "
        "it makes a new ledger from the sidecars, and no model has to run again."
    )
