"""Backups of the ledger: in one file, or in a folder, where each is checked before it gets its name, and only the newest
are kept; and copies of these in an object store."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from daemon.config.loading import Config
from daemon.config.state import closed_to_others
from daemon.core.errors import NotWritable, WrongArgument
from daemon.core.files import STDOUT, written_whole
from daemon.core.stores import list_objects, store_errors, store_of
from daemon.core.urls import split_url
from daemon.ledger.reading import Stop, Stopped, stopping
from daemon.ledger.records import open_reader
from daemon.ledger.schema import damaged
from daemon.ledger.soundness import DAMAGE, check_integrity, code_of, look_again
from daemon.maintenance.background import opened_for_reading

CHUNK_BYTES = 8 << 20  # uploaded at once
PAGES = 256  # copied at once: a megabyte
PAUSE_SECONDS = 0.01  # after each, so that others have the disk most of the time
NAME = re.compile(r"ledger-\d{4}-\d\d-\d\dT\d{6}Z\.sqlite")
PARTIAL = re.compile(rf"\.{NAME.pattern}\.partial.*")


def back_up(
    config: Config,
    file: Path,
    *,
    force: bool = False,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Copy the ledger as it is at one moment, by SQLite's own backup, whether or not a daemon writes to it.

    force: replace a file that is there. step: called with the MiB that are copied, and with all.
    Raises NothingFound, LedgerDamaged, NotWritable, WrongArgument.
    """
    if file == STDOUT:
        raise WrongArgument(
            "A backup is a database, which cannot be written to standard output; name a file."
        )
    with (
        closed_to_others(),
        open_reader(config) as reader,
        written_whole(file, reader.path, force=force, begins=(b"SQLite format 3\0",)) as partial,
    ):
        reader.back_up(partial, step)


def back_up_into(ledger: Path, folder: Path, kept: int, now: float, stop: Stop) -> Path:
    """Copy the ledger as it is now, even if others write to it, and remove all but the newest `kept` copies; returns the copy.
    A copy of a damaged ledger never takes the place of one that was whole. Runs in a thread.

    Raises Stopped, NotWritable, LedgerDamaged, LedgerUnusable.
    """
    file = folder / time.strftime("ledger-%Y-%m-%dT%H%M%SZ.sqlite", time.gmtime(now))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in _list(folder, PARTIAL):  # by a process that was killed
            left_over.unlink()
    except OSError as error:
        raise NotWritable(f"{folder} cannot be written: {error.strerror or error}.") from error
    with written_whole(file, ledger, force=True) as partial, opened_for_reading(ledger, stop) as source:
        _copy(source, partial, ledger, stop)
        os.chmod(partial, ledger.stat().st_mode & 0o777)
    for old in list_backups(folder)[:-kept]:
        if old != file:
            old.unlink()
    return file


def _copy(source: sqlite3.Connection, partial: Path, ledger: Path, stop: Stop) -> None:
    def pause(_status: int, _remaining: int, _total: int) -> None:
        if stop():
            raise Stopped
        time.sleep(PAUSE_SECONDS)

    # In a transaction all pages are from one moment; otherwise each commit of the daemon would restart the copy.
    source.execute("BEGIN")
    source.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    try:
        with contextlib.closing(sqlite3.connect(partial)) as copy:
            source.backup(copy, pages=PAGES, progress=pause)
            with stopping(copy, stop):
                check_integrity(copy)
    except sqlite3.DatabaseError as error:
        if code_of(error) in DAMAGE and look_again(ledger):
            raise damaged(ledger, error) from error
        raise OSError(str(error)) from error  # of the disk with the copy, or passing


def list_backups(folder: Path) -> list[Path]:
    """Oldest first."""
    return _list(folder, NAME)


def _list(folder: Path, names: re.Pattern[str]) -> list[Path]:
    """Oldest first: by when they were written, as a clock that was wrong may have named one of the future."""
    return sorted(
        (file for file in folder.iterdir() if names.fullmatch(file.name)),
        key=lambda file: file.stat().st_mtime_ns,
    )


def upload_backups(folder: Path, url: str, kept: int, stop: Stop) -> str:
    """Upload each of the folder's newest `kept` backups that the store lacks, and remove all but the newest `kept` from
    it; returns what was done. A backup appears there whole or not at all. Runs in a thread.

    Raises Stopped, StoreFailed, MissingLibrary.
    """
    import obstore

    bucket, prefix = split_url(url)
    store = store_of(bucket, impatient=True)
    there = _list_uploaded(store, prefix, url)
    uploaded = 0
    for file in list_backups(folder)[-kept:]:
        if there.get(file.name) == file.stat().st_size:
            continue
        with store_errors(f"{url}/{file.name}"):
            obstore.put(store, _key(prefix, file.name), _read(file, stop), chunk_size=CHUNK_BYTES)
        there.pop(file.name, None)
        there[file.name] = file.stat().st_size  # the newest
        uploaded += 1
    for name in [*there][:-kept]:
        with store_errors(f"{url}/{name}"):
            obstore.delete(store, _key(prefix, name))
    return f"{uploaded} uploaded to {url}, which has {min(len(there), kept)}"


def _list_uploaded(store: object, prefix: str, url: str) -> dict[str, int]:
    """The backups in the store and their sizes, oldest first by when they were uploaded."""
    with store_errors(url):
        found = [each for page in list_objects(store, prefix) for each in page]
    found.sort(key=lambda each: each["last_modified"])
    sizes = {each["path"]: each["size"] for each in found}
    names = {path.rpartition("/")[2]: path for path in sizes}
    return {
        name: sizes[path]
        for name, path in names.items()
        if NAME.fullmatch(name) and path == _key(prefix, name)
    }


def _read(file: Path, stop: Stop) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            if stop():
                raise Stopped
            yield chunk


def _key(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name
