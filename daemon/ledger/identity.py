"""Which ledger belongs to a state folder. The file `identity` beside the ledger has the same
id as the ledger itself, so one that is lost, emptied or swapped is not mistaken for a new one.

The ledger is made first, complete and flushed, then the file. If the start is killed between the two, there
is a ledger with an id but no file, and the next start writes the file. The opposite never happens, so a file
without its ledger means that the ledger was lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from pathlib import Path
from typing import Annotated

import msgspec

from daemon.config.loading import Config
from daemon.config.state import IDENTITY, LEDGER
from daemon.core.errors import IdentityDamaged, LedgerDamaged, LedgerUnusable, OtherLedger
from daemon.core.files import rename_durably
from daemon.core.hints import command
from daemon.ledger.schema import connect, damaged, trouble_named, unusable
from daemon.ledger.soundness import MOST, find_cut, is_blank
from daemon.ledger.statements import SQL

MARGIN = 1_000_000  # numbers left out behind the last one noted, as more may have been given since


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """ledger: the id of the ledger that belongs here. last_number: at least this many image numbers were given."""

    ledger: str
    made_at: str = ""
    last_number: Annotated[int, msgspec.Meta(ge=0, le=MOST - MARGIN)] = 0


def read(folder: Path) -> Identity | None:
    """None if there is none. Raises IdentityDamaged when it cannot be read as one, OSError."""
    file = folder / IDENTITY
    try:
        return msgspec.json.decode(file.read_bytes(), type=Identity)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    except msgspec.DecodeError as error:
        raise IdentityDamaged(
            f"{file}, which says which ledger belongs here, is damaged: {error}. "
            f"Run `{command('repair')}`: it writes the file again from the ledger."
        ) from error


def write(folder: Path, identity: Identity) -> None:
    """Write the file completely or not at all, and durably. Raises OSError."""
    file = folder / IDENTITY
    if identity.last_number > MOST - MARGIN:  # as a sidecar may say; `read` would refuse it
        identity = msgspec.structs.replace(identity, last_number=MOST - MARGIN)
    partial = file.with_name(f".{IDENTITY}.partial")
    with partial.open("wb") as out:
        out.write(msgspec.json.encode(identity) + b"\n")
        out.flush()
        os.fsync(out.fileno())
    rename_durably(partial, file)


def open_ledger(path: Path) -> tuple[sqlite3.Connection, str]:
    """Open the state folder's ledger for writing; make it if there has never been one. Also returns a remark for the log.

    Raises LedgerDamaged, also when it is not the one that belongs here; LedgerUnusable, LedgerTooNew, ConfigError.
    """
    try:
        known = expect(path)
        if path.is_file() and (cut := find_cut(path)):
            raise damaged(path, cut)
        connection = connect(path, known.ledger if known else "")
        try:
            with trouble_named(path):
                return connection, _settle(path, connection, known)
        except BaseException:
            connection.close()
            raise
    except LedgerUnusable:  # is an OSError too, and says more
        raise
    except OSError as error:
        raise unusable(path, error) from error


def _settle(path: Path, connection: sqlite3.Connection, known: Identity | None) -> str:
    present = identity_of(connection)
    if known:
        compare(path, known, present)
        return _go_on_behind(connection, known, present)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # so that its -wal may be lost, but not its tables
    write(path.parent, present)
    return ""


def adopt(path: Path) -> None:
    """Write the file again from the ledger that is there. Raises LedgerDamaged, LedgerUnusable, LedgerTooNew, OSError."""
    with trouble_named(path), contextlib.closing(connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        write(path.parent, identity_of(connection))


def expect(path: Path) -> Identity | None:
    """What is known of the ledger that belongs here. Raises LedgerDamaged when there was one and it is lost or empty."""
    known = read(path.parent)
    if known and is_blank(path):
        lost = "is empty" if path.exists() else "is lost"
        raise LedgerDamaged(f"The ledger {path}, which was made on {known.made_at}, {lost}. {_ways(path)}")
    return known


def identity_of(connection: sqlite3.Connection) -> Identity:
    id, made_at = connection.execute(SQL["meta"]).fetchone() or ("", "")
    return Identity(
        ledger=id, made_at=made_at, last_number=connection.execute(SQL["last_number"]).fetchone()[0]
    )


def compare(path: Path, known: Identity, present: Identity) -> None:
    """Raises OtherLedger when it is not the ledger that belongs here."""
    if present.ledger != known.ledger:
        raise OtherLedger(
            f"{path} is not the ledger of this state folder: it was made on {present.made_at}, the one that belongs here on "
            f"{known.made_at}. If you want to use it, remove {path.parent / IDENTITY}. Otherwise restore a backup, or run "
            f"`{command('repair')}`: it keeps this ledger if the sidecars belong to it; if not, it makes a new one from them."
        )


def _ways(path: Path) -> str:
    return (
        f"Restore a backup, or run `{command('repair')}`: it makes a new ledger from the sidecars, and no model has to run "
        f"again. To start with an empty ledger, remove {path.parent / IDENTITY}."
    )


def _go_on_behind(connection: sqlite3.Connection, known: Identity, present: Identity) -> str:
    """Make sure that a ledger older than the last one used here gives no number twice. Returns a remark for the log."""
    if present.last_number >= known.last_number:
        return ""
    following = known.last_number + MARGIN
    number_behind(connection, following)
    return (
        f"this ledger is older than the last one used here: a backup was restored, or its -wal file was lost. It knows images "
        f"up to number {present.last_number}, but numbers up to {known.last_number} were given; new images start after "
        f"{following}. Files that are still in an inbox are processed again; `{command('verify')}` lists results that it does "
        "not know."
    )


def follow(path: Path, connection: sqlite3.Connection) -> Identity:
    """The identity of the new ledger. No number is given twice, even if the sidecars
    of the last images were lost: the file `identity` may have an older number."""
    last = identity_of(connection).last_number
    with contextlib.suppress(LedgerDamaged):
        known = read(path.parent)
        last = max(last, known.last_number if known else 0)
    if 0 < last <= MOST - 2 * MARGIN:
        number_behind(connection, last + MARGIN)
    return identity_of(connection)


def number_behind(connection: sqlite3.Connection, last: int) -> None:
    """Make the next image get the number after this one."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'image'")
    connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('image', ?)", (last,))
    connection.execute("COMMIT")


def note(path: Path, present: Identity) -> None:
    """Save the last image number for a later start. The file is only a safeguard, so errors are ignored."""
    with contextlib.suppress(OSError, LedgerDamaged):
        known = read(path.parent)
        if known and known.ledger == present.ledger and known.last_number < present.last_number:
            write(path.parent, present)


def describe_lost_ledger(config: Config) -> str:
    """A warning if there are results but no ledger, or an empty one, and no file `identity`
    that says that it was lost: then a daemon makes a new ledger. Otherwise empty."""
    path = config.state.path / LEDGER
    if not is_blank(path) or (config.state.path / IDENTITY).exists():
        return ""
    if not any(name.endswith(".json") for _, _, names in os.walk(config.output.results) for name in names):
        return ""
    fix = f"`{command('repair')}` makes it from them; `{command('run')}` starts a new one."
    return f"There is no ledger at {path}, but there are results: {fix}"
