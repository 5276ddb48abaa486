"""Unpacks archives, documents and videos in an actor, as the daemon does beside its inbox (daemon/unpacking/): the members of
a.zip become images a.zip.unpacked/…, and a.zip itself becomes a row with the reason `unpacked` or `container`.

The members are written into a temporary folder, and removed when they have been read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from daemon.config.loading import Config
from daemon.errors import MissingLibrary
from daemon.inbox.sources import temporary_name
from daemon.inbox.walk import LONGEST_PATH, compile_ignored
from daemon.jobs import Failure, Version
from daemon.system.beneath import READ
from daemon.unpacking.apart import Children, Interrupted, Outcome, take_apart
from daemon.unpacking.folder import Contents, Most, NoRoom, check_room, walk_files
from daemon.unpacking.kinds import FOLDER, TIFF, find_missing, has_further_pages, kind_of
from daemon.unpacking.members import Rules
from stages.base import Reason
from stages.processes import locked_folder
from visiond.cluster.inputs import Input
from visiond.cluster.objects import open_stream

FOLDERS = "visiond-unpacking-"  # the names of the temporary folders begin with this
TARGET = b"it"  # the name that a folder of members would get; here it never does
PIECE_BYTES = 8 << 20

Unpacked = tuple[bytes, bytes | OSError | Failure]  # the name of an image, and its bytes


class Unpacker:
    """Only one thread at a time may use it."""

    def __init__(self, config: Config) -> None:
        """Raises MissingLibrary."""
        self._kinds = config.inbox[0].unpack
        self._ignored = compile_ignored(config.inbox[0].ignore)
        self._settings, self._limits = config.unpacking, config.pipeline.limits()
        self._attempts = config.pipeline.max_attempts
        if missing := find_missing(self._kinds):
            raise MissingLibrary(f"{missing}.")
        if self._kinds:
            remove_leftovers()

    def may_unpack(self, each: Input) -> bool:
        """By its name."""
        return each.kind == "file" and bool(kind_of(each.name, self._kinds))

    def unpack(self, each: Input) -> Iterator[Unpacked]:
        """The images in a file, and then the file itself with its outcome; or only the file, if it is an image.
        Raises OSError if it cannot be read."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(_held_folder())
            file = stack.enter_context(_opened(os.fsdecode(each.at), folder))
            yield from self._read(each.name, file, folder)

    def _read(self, name: bytes, file: BinaryIO, folder: Path) -> Iterator[Unpacked]:
        """A file, or a member of one. folder: a place for its own members."""
        kind = kind_of(name, self._kinds)
        if not kind or (kind == TIFF and not has_further_pages(file.fileno())):
            file.seek(0)
            yield name, file.read()
            return
        inner = Path(tempfile.mkdtemp(dir=folder))
        parent = os.open(inner, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            outcome = self._try(kind, name, file.fileno(), parent)
            if isinstance(outcome, Outcome):
                if outcome.files:
                    yield from self._members(name, parent, inner)
                outcome = outcome.describe(name + FOLDER)
            yield name, outcome
        finally:
            os.close(parent)
            shutil.rmtree(inner, ignore_errors=True)

    def _members(self, name: bytes, parent: int, folder: Path) -> Iterator[Unpacked]:
        """In the order of their paths."""
        temporary = temporary_name(TARGET)
        for path in sorted(path for path, _ in walk_files(parent, temporary)):
            place = os.path.join(os.fsencode(folder), temporary, path)
            with open(os.open(place, READ), "rb") as member:
                yield from self._read(name + FOLDER + b"/" + path, member, folder)

    def _try(self, kind: str, name: bytes, fd: int, parent: int) -> Outcome | Failure:
        """Write the members of a file. A process that is killed, perhaps because memory is short, is started again."""
        problem, disk = "", tempfile.gettempdir()
        try:
            for _ in range(self._attempts):
                try:
                    return self._take_apart(kind, name, fd, parent)
                except Interrupted as error:
                    problem = str(error)
        except NoRoom:
            problem = f"what is in it would nearly fill the disk of {disk}; make room, or set TMPDIR to another folder"
        except OSError as error:
            problem = f"it cannot be unpacked into {disk}: {error.strerror}"
        return Failure(Reason.CONTAINER, problem)

    def _take_apart(self, kind: str, name: bytes, fd: int, parent: int) -> Outcome:
        """Raises Interrupted, NoRoom, OSError."""
        settings = self._settings
        most = Most(settings.most_files, settings.most_bytes, LONGEST_PATH - len(name) - len(FOLDER) - 1)
        rules = Rules(settings.dpi, settings.video_seconds, self._limits.max_pixels)
        contents = Contents(parent, TARGET, Version(0, 0, 0, 0), most, self._ignored)
        try:
            return take_apart(fd, kind, contents, rules, self._limits, Children())
        finally:
            contents.leave()


@contextlib.contextmanager
def _opened(at: str, folder: Path) -> Iterator[BinaryIO]:
    """A file. An object is first copied into a folder, because the process that reads it may not open connections.
    Raises OSError."""
    with open_stream(at) as source:
        if _is_file(source):
            yield source
            return
        with tempfile.TemporaryFile(dir=folder) as copy:
            while piece := source.read(PIECE_BYTES):
                check_room(copy.fileno())
                copy.write(piece)
            copy.flush()
            yield copy


def _is_file(source: BinaryIO) -> bool:
    try:
        return source.fileno() >= 0
    except (AttributeError, OSError):
        return False


@contextlib.contextmanager
def _held_folder() -> Iterator[Path]:
    """A temporary folder that is locked as long as it is used."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDERS))
    try:
        with locked_folder(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers() -> None:
    """Remove the folders of actors that were killed: nobody holds their locks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        with contextlib.suppress(OSError), locked_folder(folder):
            shutil.rmtree(folder)
