"""Checks a ledger when it is opened, as far as a short time allows; `visiond verify` reads all of it.

Always checked: the file's length, its tables and indexes by name and text, the free list, the last number
given, and the small tables with their indexes. A ledger of up to SMALL_BYTES is read from end to end.
Checksums are compared whenever a row is read (checksums.py).

SQLite reports a page that could not be read from the disk as if the file were damaged: EIO becomes SQLITE_CORRUPT in any
statement, and a line of text in an integrity check. So nothing is called damaged before `look_again` has agreed.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import struct
from contextlib import closing
from functools import cache
from pathlib import Path

from daemon.ledger.statements import SQL

SMALL_BYTES = 256 << 20  # which SQLite checks in half a second
MOST = 1 << 53  # the highest number of an image, and the largest size: every JSON parser keeps these exact
MAGIC = b"SQLite format 3\0"
HEADER_BYTES = 100
SMALL_TABLES = ("inbox", "model", "meta", "sink")
LOOKS = 2  # more that must all find damage; every byte is read from the disk after each of them
PAGE_BYTES = 4096  # read at once by a look, as SQLite does
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)  # as SQLite says it, rightly or not
DISK = (  # the disk refuses for now, or memory or a lock is lacking
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOMEM,
)
# What an integrity check says of a page that could not be read, with or without SQLite's code.
_NOT_READ = re.compile(
    r"(?:unable|failed) to (?:get|read)\b(?:.*error code=(\d+))?", re.IGNORECASE | re.DOTALL
)


def is_blank(path: Path) -> bool:
    """Whether the ledger has no content: the file is missing or empty, or has no tables, and there is no -wal to apply.

    SQLite reads it, because this process may have the ledger open: closing a file releases all locks that the
    process has on it (fcntl(2)), except if SQLite closes it. Without them, another program that opens and closes the
    ledger believes that it is the last one, and deletes the -wal that the daemon writes to.

    Raises OSError.
    """
    if not path.is_file():
        return not path.exists()
    if not path.stat().st_size:
        return True  # SQLite deletes the -wal of an empty file
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    wal = Path(f"{path}-wal")
    if wal.exists() and wal.stat().st_size:
        return False
    try:
        address = f"{path.absolute().as_uri()}?immutable=1"  # without -wal and -shm, which would be made
        with closing(sqlite3.connect(address, uri=True)) as connection:
            return not connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0]
    except (sqlite3.DatabaseError, UnicodeDecodeError):  # of a message that quotes damaged text
        return False  # whoever opens it reports what is wrong


def find_cut(path: Path) -> str:
    """What is wrong if the file is shorter than its header says; otherwise empty. With a -wal,
    the rest may be in that. Not for a ledger that this process has open: see is_blank."""
    wal = Path(f"{path}-wal")
    if wal.exists() and wal.stat().st_size:
        return ""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        return ""  # SQLite reports what is wrong with it
    size, pages = struct.unpack_from(">H10xI", head, 16)
    page_bytes = 65536 if size == 1 else size
    is_valid = head[24:28] == head[92:96]  # else an old SQLite wrote last, which did not keep the count
    length = path.stat().st_size
    if is_valid and length < page_bytes * pages:
        return f"it is cut short: it has {length} of {page_bytes * pages} bytes"
    return ""


def find_fault(connection: sqlite3.Connection, *, current: bool) -> str:
    """What is wrong with an open ledger, in a few words; empty when nothing is found. current: its schema is this program's.

    Raises sqlite3.DatabaseError.
    """
    pages, page_bytes = _pragma(connection, "page_count"), _pragma(connection, "page_size")
    if _pragma(connection, "freelist_count") > pages:
        return "its list of free pages is longer than the file"
    if current and (fault := find_altered_tables(connection)):
        return fault
    small = pages * page_bytes <= SMALL_BYTES
    for scope in ("1",) if small else SMALL_TABLES if current else ():
        check_integrity(connection, scope)
    last = connection.execute(SQL["last_number"]).fetchone()[0]
    highest = connection.execute(SQL["last_id"]).fetchone()[0]
    if not highest <= last <= MOST:
        return f"its last image number is {last}, the highest number in a row is {highest}, and the limit is {MOST}"
    return ""


def check_integrity(connection: sqlite3.Connection, scope: str = "1") -> None:
    """Raises sqlite3.DatabaseError with what SQLite finds wrong in the whole file, or in one table; its code is that of
    an error of the disk if that did not deliver a page."""
    found: str = connection.execute(f"PRAGMA integrity_check({scope})").fetchone()[0]
    if found == "ok":
        return
    unread = _NOT_READ.search(found)
    error = sqlite3.DatabaseError(found.replace("\n", " "))
    is_read = not unread or int(unread[1] or 0) & 0xFF in DAMAGE
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT if is_read else sqlite3.SQLITE_IOERR
    raise error


def code_of(error: BaseException) -> int:
    """SQLite's primary result code; 0 for errors of Python's own module."""
    if isinstance(error, MemoryError):  # how Python reports SQLite's lack of memory
        return sqlite3.SQLITE_NOMEM
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def look_again(path: Path) -> bool:
    """Whether a database that SQLite has called damaged is so. It is read from end to end, by SQLite and without it.
    Raises OSError or sqlite3.DatabaseError while its disk fails."""
    for _ in range(LOOKS):
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                tables_of(connection)
                check_integrity(connection)
                return False
        except UnicodeDecodeError:
            pass  # a damaged name of a table, or the message that quotes one
        except sqlite3.DatabaseError as error:
            if code_of(error) in DISK:
                raise
        for file in (path, Path(f"{path}-wal")):
            _read_through(file)
    return True


def _read_through(file: Path) -> None:
    """Read every byte from the disk. Raises OSError."""
    try:
        status = os.stat(file)
        fd = _descriptor(file, status.st_dev, status.st_ino)
    except FileNotFoundError:
        return
    for start in range(0, status.st_size, PAGE_BYTES):
        os.pread(fd, PAGE_BYTES, start)


@cache
def _descriptor(file: Path, device: int, inode: int) -> int:
    """Never closed: that would release the locks that SQLite has on the file in this process (see is_blank)."""
    return os.open(file, os.O_RDONLY | os.O_CLOEXEC)


def find_altered_tables(connection: sqlite3.Connection) -> str:
    """What is wrong with the tables of a ledger with this program's schema; empty when nothing is.
    SQLite's own check accepts each table that it can read. Raises sqlite3.DatabaseError."""
    missing = expected_tables() - tables_of(connection)
    return f"{len(missing)} of its tables or indexes are not as visiond makes them" if missing else ""


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def tables_of(connection: sqlite3.Connection) -> frozenset[str]:
    """The statements that made tables and indexes, without comments and spaces."""
    made = connection.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
    return frozenset(f"{name}: " + re.sub(r"--.*|\s", "", sql) for name, sql in made)


@cache
def expected_tables() -> frozenset[str]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SQL["schema"])
        return tables_of(connection)
