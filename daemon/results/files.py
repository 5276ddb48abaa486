"""Sinks that write an export's files for each image to a folder, when the image is finished. Each image has one name there, so
a record that comes again replaces its file."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from anyio import to_thread

from daemon.config.loading import Config
from daemon.config.state import SINK_FILES
from daemon.core.errors import NotWritable
from daemon.core.files import create, sync_folders, temporary_name
from daemon.core.hints import command
from daemon.core.jobs import JobStatus
from daemon.core.sidecar import sidecar_paths
from daemon.exports.answered import Answered
from daemon.exports.label_studio import write_task
from daemon.exports.pages import PAGES, PageFormat
from daemon.ledger.record import Record
from daemon.results.destinations import DISK_TROUBLE, unlink
from daemon.system.mounts import KnownFolder, describe_closed

OWNERS = """
PRAGMA synchronous = EXTRA;
CREATE TABLE IF NOT EXISTS file (
    sink TEXT, name BLOB, image BLOB, PRIMARY KEY (sink, name)  -- image: its path in the inbox, whose folder begins the name
) WITHOUT ROWID;
"""


# These sinks, and what is in a file.
FILES = PAGES | {"label-studio": PageFormat(".json", write_task)}


class SinkFile(NamedTuple):
    """paths: the file gets the first of these names that is possible. make: writes it, with a temporary name; None: there is to
    be none."""

    paths: Sequence[bytes]
    make: Callable[[bytes], None] | None


def put_files(known: KnownFolder, files: Sequence[SinkFile]) -> None:
    """Write these files. None has its name before its bytes are on the disk. Two flushes of the file system take less time than
    one of each file. Raises OSError."""
    known.check()
    named = [(temporary_name(paths[-1]) if make else b"", paths, make) for paths, make in files]
    try:
        for temporary, _, make in named:
            if make:
                make(temporary)
        sync_folders([known.path])
        for temporary, paths, make in named:
            if make:
                _rename(temporary, paths)
            else:
                _unlink_all(paths)
        sync_folders([known.path])
    except BaseException:
        with contextlib.suppress(OSError):
            _unlink_all(temporary for temporary, _, make in named if make)
        raise
    known.check()


class FileSink:
    """Records that are DONE: <results>.<sink>/<inbox's name>/<path><suffix>, the last state of each image."""

    def __init__(self, sink: str, config: Config) -> None:
        self._sink = sink
        self._page = FILES[sink]
        self._folder = os.fsencode(config.output.folder_of(sink))
        self._known = KnownFolder(self._folder)
        self._inboxes = {inbox.root: inbox.name for inbox in config.inbox}
        self._owners = config.state.path / SINK_FILES

    def problem(self) -> str:
        folder = Path(os.fsdecode(self._folder))
        if not (why := describe_closed(folder)) and self._page.replaces:
            why = self._describe_owners()
        return why

    async def append(self, records: Sequence[Record]) -> None:
        """An image that has nothing to say in this format, as one without a caption, has no file. Raises OSError, and
        NotWritable if the names cannot be noted."""
        # A later version of a file, or its next state, has the same name.
        last = {(record.inbox, record.path): record for record in records if record.status is JobStatus.DONE}
        if last:
            await to_thread.run_sync(self._write_all, [*last.values()], abandon_on_cancel=True)

    def _write_all(self, records: Sequence[Record]) -> None:
        texts = [self._page.make(self._answered(record)).encode() for record in records]
        put_files(
            self._known,
            [
                SinkFile(paths, partial(write_file, data=text) if text else None)
                for text, paths in zip(texts, self._name(records, texts), strict=True)
            ],
        )

    def _answered(self, record: Record) -> Answered:
        path = record.path.decode(errors="replace")
        return Answered(record, os.path.join(os.fsdecode(self._inbox(record)), path), [])

    def _inbox(self, record: Record) -> bytes:
        """Its folder; by its number, if it is no longer configured."""
        return os.fsencode(self._inboxes.get(record.inbox_path, f"inbox-{record.inbox}"))

    def _name(self, records: Sequence[Record], texts: Sequence[bytes]) -> list[list[bytes]]:
        """For each record its path, and a second one for when something is in the way of the first. The last one lies at the
        top of its inbox's folder. An image without a text takes no name from others."""
        suffix = self._page.suffix.encode()
        names = [[*sidecar_paths(self._inbox(record), record.path, suffix)] for record in records]
        if self._page.replaces:
            for record, known in zip(records, names, strict=True):
                stem = os.path.splitext(record.path)[0]
                known.insert(0, sidecar_paths(self._inbox(record), stem, suffix)[0])
            with self._open_owners() as owners:
                names = [
                    self._choose(owners, record.path, known, takes=bool(text))
                    for record, known, text in zip(records, names, texts, strict=True)
                ]
        return [[os.path.join(self._folder, name) for name in known] for known in names]

    @contextlib.contextmanager
    def _open_owners(self) -> Iterator[sqlite3.Connection]:
        """One transaction, on the disk at its end. Raises NotWritable; also if it is lost, as then an image would get the
        name of another one's file.

        Never opened only to be read: SQLite then refuses to undo what a killed daemon has left half written."""
        try:
            with contextlib.closing(sqlite3.connect(self._owners)) as connection:
                connection.executescript(OWNERS)
                with connection:
                    asked = connection.execute("SELECT 1 FROM file WHERE sink = ? LIMIT 1", (self._sink,))
                    if not asked.fetchone() and self._has_files():
                        raise NotWritable(self._say_unknown())
                    yield connection
        except sqlite3.Error as error:
            raise NotWritable(
                f"{self._owners} cannot be used: {error}. It says which image has which file; if it is damaged, remove it, "
                f"and move {os.fsdecode(self._folder)} away"
            ) from error

    def _describe_owners(self) -> str:
        """Why it is not known whose files there are. A look creates nothing: it may be of another user."""
        if not self._owners.exists():
            return self._say_unknown() if self._has_files() else ""
        try:
            with self._open_owners():
                return ""
        except NotWritable as error:
            return str(error)

    def _say_unknown(self) -> str:
        export = command("export", "--format", self._sink, "FOLDER")
        return (
            f"{os.fsdecode(self._folder)} has files, and {self._owners} does not say of which images. Move that folder away; "
            f"`{export}` writes the files of all images"
        )

    def _has_files(self) -> bool:
        """Whether there are any for these inboxes; the folder may have those of other daemons too."""
        folders = (os.path.join(self._folder, os.fsencode(name)) for name in self._inboxes.values())
        return any(names for folder in folders for _, _, names in os.walk(folder))

    def _choose(
        self, owners: sqlite3.Connection, image: bytes, names: Sequence[bytes], *, takes: bool
    ) -> list[bytes]:
        """The first name that no other image has, and the last one, which is a digest of the image's path. The image that
        got a name first keeps it. takes: whether it may get one that it did not have."""
        *common, own = names
        for name in common:
            key = (self._sink, name)
            if takes:
                owners.execute("INSERT OR IGNORE INTO file VALUES (?, ?, ?)", (*key, image))
            asked = owners.execute("SELECT image FROM file WHERE sink = ? AND name = ?", key)
            if asked.fetchone() == (image,):
                return [name, own]
        return [own]


def _unlink_all(paths: Iterable[bytes]) -> None:
    """Raises OSError if one that is there cannot be removed."""
    for path in paths:
        unlink(path)


def write_file(path: bytes, data: bytes) -> None:
    with os.fdopen(create(path), "wb") as file:
        file.write(data)


def _rename(temporary: bytes, paths: Sequence[bytes]) -> None:
    """Give a file the first of these names that is possible: there may be a folder with it, or a file in the place of its
    folder."""
    for path in paths:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.rename(temporary, path)
        except OSError as error:
            if error.errno in DISK_TROUBLE or path == paths[-1]:
                raise
        else:
            for other in paths:
                if other != path:  # from when something else was possible
                    unlink(other)
            return
