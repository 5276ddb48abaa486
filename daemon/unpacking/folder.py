"""The folder with what was in a file: written beside it under another name, and renamed when it is complete.

Names come from strangers. A member gets a path of plain names below the folder, whatever the file says; what cannot
have one is left out and counted.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec

from daemon.inbox.sources import temporary_name
from daemon.jobs import Version
from daemon.ledger.files import sync_folder
from daemon.results.destinations import LONGEST_NAME, sync_folders
from daemon.unpacking.kinds import FOLDER

MARK = ".visiond-unpacked"  # a file in each such folder; ignored, as all hidden files are
ROOM_BYTES = 1 << 30  # of the disk, which are left free
CHECKED_BYTES = 64 << 20  # that are written between two looks at the disk
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
NAMED = 3  # members that a message names
SEPARATORS = re.compile(rb"[/\\]+")
UNPRINTABLE = re.compile(rb"[\x00-\x1f\x7f]")


class Mark(msgspec.Struct, frozen=True):
    """Which version of a file the folder is of, and whether all of the file is in it."""

    version: Version
    files: int
    is_whole: bool


class TooMuch(Exception):
    """A limit is reached; the message says which, and how to raise it."""


class Most(NamedTuple):
    """What a file may become. path_bytes: of a member's path below the folder."""

    files: int
    bytes: int
    path_bytes: int


class Contents:
    """Writes members below a temporary folder. `place` gives it its name."""

    def __init__(self, target: bytes, version: Version, most: Most, ignored: re.Pattern[bytes]) -> None:
        """target: absolute, of the finished folder. ignored: names that the inbox ignores; such members are not
        written, and not counted. Raises OSError."""
        self.target, self.version = target, version
        self.files = 0
        self.missing = 0
        self.left_out: list[str] = []  # a sentence for each of the first members that are missing
        self._most, self._ignored = most, ignored
        self._bytes = 0
        self._unchecked = CHECKED_BYTES  # bytes since the room on the disk was looked at
        self._folder = temporary_name(target)
        self._open: int | None = None
        self._name = self._path = b""
        shutil.rmtree(self._folder, ignore_errors=True)  # of a daemon that was killed
        os.mkdir(self._folder)

    def begin(self, name: bytes) -> None:
        """Raises TooMuch, OSError."""
        if self.files >= self._most.files:
            raise TooMuch(
                f"it has more than {self._most.files:,} files. {advise('files', 10 * self._most.files)}"
            )
        self._name, self._path = name, plain_path(name, self._most.path_bytes)
        if any(map(self._ignored.fullmatch, self._path.split(b"/"))):
            self._name = b""
        elif self._path:
            file = os.path.join(self._folder, self._path)
            try:
                os.makedirs(os.path.dirname(file), exist_ok=True)
                self._open = os.open(file, NEW, 0o666)
            except (FileExistsError, NotADirectoryError):  # another member has the name, or that of a folder
                self._path = b""

    def write(self, piece: bytes) -> None:
        """Raises TooMuch, OSError."""
        self._bytes += len(piece)
        if self._bytes > self._most.bytes:
            limit = advise("bytes", 10 * self._most.bytes)
            raise TooMuch(f"its files have more than {self._most.bytes:,} bytes. {limit}")
        if self._open is not None:
            self._keep_room(len(piece))
            while piece:
                piece = piece[os.write(self._open, piece) :]

    def finish(self, problem: str = "") -> None:
        """The member has ended. problem: why it is incomplete; then it is dropped."""
        is_there = self._open is not None
        self._close()
        if is_there and not problem:
            self.files += 1
            return
        if is_there:
            os.unlink(os.path.join(self._folder, self._path))
        if self._name:
            self.leave_out(self._name, problem or "its name cannot be used, or another file has it")

    def leave_out(self, name: bytes, problem: str) -> None:
        self.missing += 1
        if len(self.left_out) < NAMED:
            self.left_out.append(f"{name.decode(errors='replace')}: {problem}")

    def place(self, *, is_whole: bool) -> None:
        """Give it its name, in the place of one of an earlier version. All of it is on the disk then. Raises OSError."""
        Path(os.fsdecode(self._folder), MARK).write_bytes(
            msgspec.json.encode(Mark(self.version, self.files, is_whole))
        )
        sync_folders([self._folder])
        if os.path.lexists(self.target):
            old = temporary_name(self._folder)
            shutil.rmtree(old, ignore_errors=True)
            os.rename(self.target, old)
            os.rename(self._folder, self.target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(self._folder, self.target)
        sync_folder(os.path.dirname(self.target))

    def _keep_room(self, size: int) -> None:
        """Raises OSError when the disk is nearly full: results need room too."""
        self._unchecked += size
        if self._unchecked > CHECKED_BYTES:
            self._unchecked = 0
            disk = os.statvfs(self._folder)
            if disk.f_bavail * disk.f_frsize < ROOM_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._folder)

    def drop(self) -> None:
        self._close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _close(self) -> None:
        if self._open is not None:
            os.close(self._open)
            self._open = None


def target_of(root: bytes, path: bytes) -> bytes:
    """The folder for a file of an inbox."""
    return os.path.join(root, path + FOLDER)


def mark_of(target: bytes) -> Mark | None:
    """What a folder is of; None if it is not one of these, or there is none."""
    try:
        return msgspec.json.decode(Path(os.fsdecode(target), MARK).read_bytes(), type=Mark)
    except (OSError, msgspec.DecodeError):
        return None


def plain_path(name: bytes, longest: int) -> bytes:
    """A path of plain names for a member; empty if it can have none. Folders that lead upwards are left out."""
    parts = [UNPRINTABLE.sub(b"_", part) for part in SEPARATORS.split(name)]
    parts = [part for part in parts if part not in (b"", b".", b"..")]
    path = b"/".join(parts)
    return path if parts and len(path) <= longest and max(map(len, parts)) <= LONGEST_NAME else b""


def advise(key: str, value: int) -> str:
    return f"To allow it, set {key} = {value} under [unpacking] in daemon.toml"
