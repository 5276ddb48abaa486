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

from daemon.config.ignored import ignored_by
from daemon.config.loading import Config
from daemon.core.errors import MissingLibrary
from daemon.core.files import temporary_name
from daemon.core.jobs import Failure, Version
from daemon.core.urls import is_url
from daemon.inbox.walk import LONGEST_PATH
from daemon.system.beneath import READ
from daemon.unpacking.apart import Children, Interrupted, UnpackOutcome, take_apart
from daemon.unpacking.folder import Contents, Most, NoRoom, check_room
from daemon.unpacking.kinds import FOLDER, TIFF, find_missing, has_further_pages, kind_of
from daemon.unpacking.members import Rules
from daemon.unpacking.paths import walk_files
from stages.contract.base import Reason
from visiond.cluster.reading.inputs import ClusterInput
from visiond.cluster.reading.objects import open_stream
from visiond.cluster.reading.temporary import held_folder, name_disk, remove_leftovers, with_room

TARGET = b"it"  # the name that a folder of members would get; here it never does
PIECE_BYTES = 8 << 20
COPY = "copy"  # of an object, in the temporary folder
CONTENTS = "what is in it"

Unpacked = tuple[bytes, bytes | OSError | Failure]  # the name of an image, and its bytes


class ClusterUnpacker:
    """Only one thread at a time may use it."""

    def __init__(self, config: Config) -> None:
        """Raises MissingLibrary, TemporaryUnusable."""
        self._kinds = config.inbox[0].unpack
        self._ignored = ignored_by(config.inbox[0].ignore)
        self._settings, self._limits = config.unpacking, config.pipeline.limits()
        self._attempts = config.pipeline.max_attempts
        if missing := find_missing(self._kinds):
            raise MissingLibrary(f"{missing}.")
        if self._kinds:
            remove_leftovers()

    def may_unpack(self, each: ClusterInput) -> bool:
        """By its name."""
        return each.kind == "file" and bool(kind_of(each.name, self._kinds))

    def unpack(self, each: ClusterInput) -> Iterator[Unpacked]:
        """The images in a file, and then the file itself with its outcome; or only the file, if it is an image.
        Raises OSError if it cannot be read, and TemporaryUnusable."""
        at = os.fsdecode(each.at)
        with held_folder() as folder:
            try:
                file = with_room(folder, lambda: _copy(at, folder)) if is_url(at) else open_stream(at)
            except NoRoom:
                yield each.name, _too_large("it")
                return
            with file:
                yield from self._read(each.name, file, folder)

    def _read(self, name: bytes, file: BinaryIO, folder: Path) -> Iterator[Unpacked]:
        """A file, or a member of one. folder: the temporary folder, also for its own members."""
        kind = kind_of(name, self._kinds)
        if not kind or (kind == TIFF and not has_further_pages(file.fileno())):
            file.seek(0)
            yield name, file.read()
            return
        try:
            inner = Path(with_room(folder, lambda: tempfile.mkdtemp(dir=folder)))
        except NoRoom:
            yield name, _too_large(CONTENTS)
            return
        parent = os.open(inner, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            outcome = self._try(kind, name, file.fileno(), parent, folder)
            if isinstance(outcome, UnpackOutcome):
                if outcome.files:
                    yield from self._members(name, parent, inner, folder)
                outcome = outcome.describe(name + FOLDER)
            yield name, outcome
        finally:
            os.close(parent)
            shutil.rmtree(inner, ignore_errors=True)

    def _members(self, name: bytes, parent: int, inner: Path, folder: Path) -> Iterator[Unpacked]:
        """In the order of their paths."""
        temporary = temporary_name(TARGET)
        for path in sorted(path for path, _ in walk_files(parent, temporary)):
            place = os.path.join(os.fsencode(inner), temporary, path)
            with open(os.open(place, READ), "rb") as member:
                yield from self._read(name + FOLDER + b"/" + path, member, folder)

    def _try(self, kind: str, name: bytes, fd: int, parent: int, folder: Path) -> UnpackOutcome | Failure:
        """Write the members of a file. A process that is killed, perhaps because memory is short, is started again.
        Raises TemporaryUnusable."""
        problem = ""
        try:
            for _ in range(self._attempts):
                try:
                    return with_room(folder, lambda: self._take_apart(kind, name, fd, parent))
                except Interrupted as error:
                    problem = str(error)
        except NoRoom:
            return _too_large(CONTENTS)
        except OSError as error:
            problem = f"it cannot be unpacked into {name_disk()}: {error.strerror}"
        return Failure(Reason.CONTAINER, problem)

    def _take_apart(self, kind: str, name: bytes, fd: int, parent: int) -> UnpackOutcome:
        """Raises Interrupted, NoRoom, OSError."""
        settings = self._settings
        longest = LONGEST_PATH - len(name) - len(FOLDER) - 1
        most = Most(settings.most_files, settings.most_bytes, longest, settings.most_ratio)
        rules = Rules(settings.dpi, settings.video_seconds, self._limits.max_pixels)
        contents = Contents(parent, TARGET, Version(0, 0, 0, 0), most, self._ignored.hides)
        try:
            outcome = take_apart(fd, kind, contents, rules, self._limits, Children())
        except BaseException:
            contents.close()  # another attempt needs the room
            raise
        contents.leave()
        return outcome


def _copy(at: str, folder: Path) -> BinaryIO:
    """A copy of an object, because the process that reads it may not open connections. Raises OSError, NoRoom."""
    place = folder / COPY
    with open_stream(at) as source, contextlib.ExitStack() as stack:
        stack.callback(place.unlink, missing_ok=True)
        copy = stack.enter_context(open(place, "w+b"))
        while piece := source.read(PIECE_BYTES):
            check_room(copy.fileno())
            copy.write(piece)
        copy.flush()
        stack.pop_all()
        return copy


def _too_large(what: str) -> Failure:
    problem = (
        f"{what} would nearly fill the disk of {name_disk()}; make room, or set TMPDIR to another folder"
    )
    return Failure(Reason.CONTAINER, problem)
