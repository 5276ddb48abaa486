"""The folder with what was in a file: written beside it under another name, and renamed when it is complete.

Names come from strangers. A member gets a path of plain names below the folder, whatever the file says; what cannot
have one is left out and counted. Whoever delivers files may also replace a folder by a link at any moment, so every folder
is opened from the one above it, without following links.

A kill at any moment leaves no folder that looks complete and is not: a temporary folder without a mark is made
again, and one with a mark is complete and gets its name.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from daemon.core.files import sync_file_system, temporary_name
from daemon.core.jobs import Version
from daemon.system.beneath import READ
from daemon.unpacking.paths import (
    INNER,
    MARK,
    FreePaths,
    allow_as,
    exists,
    made_inner,
    open_below,
    opened,
    plain_path,
    printable,
    remove,
    walk_files,
)

ROOM_BYTES, KEPT_SHARE = 1 << 30, 20  # left free on the disk; on a small one a twentieth
ROOM_FILES = 10_000  # as many inodes are left free; on a small disk a twentieth
CHECKED_BYTES = 1 << 20  # that are written between two looks at the disk
ENTRY_BYTES = 4096  # that a file or folder takes on the disk, at least
ANY_RATIO_BYTES = 64 << 20  # so much may come from a file of any size
# Of all paths together: they are kept in memory, and the mark must stay below MARK_BYTES.
MOST_NAME_BYTES = 128 << 20
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
MARK_BYTES = 256 << 20  # of a mark that is read: others may write to the inbox
NAMED = 3  # members that a message names
# Two names are one for this file system; or it takes no such name, as exFAT and SMB no colon.
UNFIT = (errno.EEXIST, errno.ENOTDIR, errno.EINVAL, errno.EILSEQ, errno.ENAMETOOLONG)
# What macOS packs beside each file; no pictures, whatever their names.
APPLE = re.compile(rb"__MACOSX|\._.*", re.DOTALL)


class Mark(msgspec.Struct, frozen=True):
    """Which version of a file the folder is of, and what was put into it. The files may have left it since.
    paths: of the files, if not all of the container is there: then another attempt adds only what is missing."""

    version: Version
    files: int
    links: int = 0  # links and devices, which were left out
    is_whole: bool = True
    paths: list[bytes] = []

    def is_of(self, version: Version, *, moved: bool) -> bool:
        """moved: the daemon has moved the file since; then its inode and its change time may be others."""
        if moved:
            return (self.version.size, self.version.mtime_ns) == (version.size, version.mtime_ns)
        return self.version == version


class TooMuch(Exception):
    """A limit is reached; the message says which, and how to raise it."""


class NoRoom(OSError):
    """The disk is nearly full. is_new: because of what was written or would be written."""

    def __init__(self, *, is_new: bool) -> None:
        super().__init__(errno.ENOSPC, "its disk is nearly full")
        self.is_new = is_new


class Most(NamedTuple):
    """What a file may become. path_bytes: of a member's path below the folder. ratio: its bytes to those of the file."""

    files: int
    bytes: int
    path_bytes: int
    ratio: int = 1100


class Contents:
    """Writes members below a temporary folder. `place` gives it its name."""

    def __init__(
        self,
        parent: int,
        target: bytes,
        version: Version,
        most: Most,
        is_ignored: Callable[[bytes], bool],
        before: Mark | None = None,
    ) -> None:
        """parent: a descriptor of the folder with the container. target: the name of the finished folder in it. is_ignored: by
        the inbox; such members are not written. before: of an earlier attempt that did not get everything. Raises OSError."""
        self.files = 0
        self.links = 0
        self.missing = 0
        self.left_out: list[str] = []  # a sentence for each of the first members that are missing
        self._parent, self._target, self._version = parent, target, version
        self._most, self._is_left_out = most, is_ignored
        self._before = frozenset(before.paths) if before else frozenset[bytes]()
        self._paths: set[bytes] = set()  # of the members so far
        self._free_paths = FreePaths(most.path_bytes)
        self._count = 0  # of all members, also those that are not written, and of the folders that are made
        self._folders = 0  # entries for folders
        self._bytes = 0
        self._packed_bytes = 1  # of the container
        self._expanded_bytes = most.bytes  # the most by `most.ratio`
        self._unchecked = 0  # bytes since the room on the disk was looked at
        self._fd: int | None = None  # the file of the member that has begun
        self._name = self._path = b""
        self._is_complete = False
        self._temporary = temporary_name(target)
        check_room(parent, is_new=False)
        remove(parent, self._temporary)  # of a daemon that was killed
        os.mkdir(self._temporary, dir_fd=parent)
        self._folder = os.open(self._temporary, INNER, dir_fd=parent)
        allow_as(parent, self._folder)

    def compare_with(self, packed_bytes: int) -> None:
        """The size of the container, to which `most.ratio` refers."""
        self._packed_bytes = max(1, packed_bytes)
        self._expanded_bytes = max(ANY_RATIO_BYTES, self._most.ratio * packed_bytes)

    def expect(self, files: int, size: int) -> None:
        """The container says that it has so much. Raises TooMuch, NoRoom, OSError."""
        self._check(files, size)
        check_room(self._folder, size)

    def begin(self, name: bytes, size: int = 0) -> None:
        """A member begins. size: what it says. Raises TooMuch, NoRoom, OSError."""
        self.finish_open()
        self._count += 1
        self._check(self._count, self._bytes + size)
        self._name, self._path = name, plain_path(name, self._most.path_bytes)
        if self._is_ignored(self._path):
            self._name = self._path = b""
        elif self._path:
            self._path = self._free_paths.choose(self._path)
            if self._free_paths.bytes > MOST_NAME_BYTES:
                most = f"the names of its files have more than {MOST_NAME_BYTES:,} bytes"
                raise TooMuch(f"{most}: pack fewer files together")
            if self._path and self._path not in self._before:
                self._unchecked += ENTRY_BYTES
                self._look_at_disk(size)
                self._open()
            if self._path:
                self._paths.add(self._path)

    def _is_ignored(self, path: bytes) -> bool:
        return any(map(APPLE.fullmatch, path.split(b"/"))) or self._is_left_out(path)

    def _open(self) -> None:
        *folders, name = self._path.split(b"/")
        try:
            with made_inner(self._folder, folders, self._count_folder) as folder:
                self._fd = os.open(name, NEW, 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno not in UNFIT:
                raise
            self._path = b""

    def _count_folder(self) -> None:
        """One is to be made. Raises TooMuch, NoRoom."""
        self._count += 1
        self._bytes += ENTRY_BYTES
        self._check(self._count, self._bytes)
        self._unchecked += ENTRY_BYTES
        self._look_at_disk()

    def _look_at_disk(self, size: int = 0) -> None:
        """Raises NoRoom. size: of what comes."""
        if self._unchecked + size >= CHECKED_BYTES:
            self._unchecked = 0
            check_room(self._folder, size)

    def write(self, piece: bytes) -> None:
        """Raises TooMuch, NoRoom, OSError."""
        self._bytes += len(piece)
        self._check(self._count, self._bytes)
        if self._fd is not None:
            self._unchecked += len(piece)
            self._look_at_disk()
            while piece:
                piece = piece[os.write(self._fd, piece) :]

    def finish(self, problem: str = "") -> None:
        """The member has ended. problem: why it is incomplete; then it is dropped."""
        fd, self._fd = self._fd, None
        is_written = fd is not None
        if fd is not None:
            os.close(fd)
        if self._path in self._before or (is_written and not problem):
            self.files += 1
        else:
            if is_written:
                *folders, name = self._path.split(b"/")
                with made_inner(self._folder, folders) as folder:
                    os.unlink(name, dir_fd=folder)
                self._paths.discard(self._path)
            if self._name:
                self._leave_out(problem or "its name cannot be used, or another file has it")
        self._name = self._path = b""

    def finish_open(self) -> None:
        """The child was ended within a member."""
        if self._fd is not None:
            self.finish("it is not complete")

    def pass_over(self) -> None:
        """A link or a device. Raises TooMuch."""
        self._count += 1
        self.links += 1
        self._check(self._count, self._bytes)

    def pass_folder(self) -> None:
        """An entry for a folder. It is made with the first file in it, and counts as a file then. Raises TooMuch."""
        self._folders += 1
        self._check(self._folders, self._bytes)

    def repeat(self, name: bytes, first: bytes) -> None:
        """A hard link: a file like the one that the container had under `first`, but of its own, as each image is moved or
        deleted by itself. Raises TooMuch, NoRoom, OSError."""
        path = plain_path(first, self._most.path_bytes)
        if self._is_ignored(plain_path(name, self._most.path_bytes)):
            self.pass_over()
            return
        if path and self._is_ignored(path):  # and so its bytes are not here
            self.begin(name)
            self.finish(
                f"it is a link to {printable(first)}, which the inbox ignores; pack it without that one"
            )
            return
        path = self._free_paths.latest(path)
        try:
            place = (
                (self._parent, os.path.join(self._target, path))
                if path in self._before
                else (self._folder, path)
            )
            source = open_below(*place)
        except (OSError, ValueError):  # ValueError: a name with a zero byte
            self.begin(name)
            self.finish(f"it is a link to {printable(first)}, which is not in it")
            return
        with open(source, "rb") as file:
            self.begin(name, os.fstat(source).st_size)
            while piece := file.read(CHECKED_BYTES):
                self.write(piece)
            self.finish()

    def _leave_out(self, problem: str) -> None:
        self.missing += 1
        if len(self.left_out) < NAMED:
            self.left_out.append(f"{printable(self._name)}: {problem}")

    def place(self, *, is_whole: bool) -> None:
        """Put it in its place. All of it is on the disk then. Raises OSError."""
        self.finish_open()
        is_whole = is_whole and not self.missing
        paths = [] if is_whole else sorted(self._paths)
        mark = Mark(self._version, self.files, self.links, is_whole, paths)
        sync_file_system(self._folder)  # before the mark, which says that all of it is there
        with open(os.open(MARK, NEW, 0o666, dir_fd=self._folder), "wb") as file:
            file.write(msgspec.json.encode(mark))
        sync_file_system(self._folder)
        self._is_complete = True
        finish_placing(self._parent, self._target, mark)

    def leave(self) -> None:
        """To be called instead of `place` and `close`: the files stay in the temporary folder. The caller reads them there
        and removes them."""
        self.finish_open()
        os.close(self._folder)

    def close(self) -> None:
        """Without `place` nothing is left of it."""
        self.leave()
        if not self._is_complete:
            remove(self._parent, self._temporary)

    def _check(self, files: int, size: int) -> None:
        """Raises TooMuch."""
        if files > self._most.files:
            problem = f"it has more than {self._most.files:,} files, folders and links"
            more = f"most_files = {10 * self._most.files}"
        elif size > self._most.bytes:
            problem = f"its files have more than {self._most.bytes:,} bytes"
            more = f"most_bytes = {max(10 * self._most.bytes, size)}"
        elif size > self._expanded_bytes:
            problem = f"its files have more than {self._most.ratio:,} times its own bytes"
            more = f"most_ratio = {max(10 * self._most.ratio, -(-size // self._packed_bytes))}"
        else:
            return
        raise TooMuch(f"{problem}. To allow it, set {more} under [unpacking] in daemon.toml")


def check_room(fd: int, size: int = 0, *, is_new: bool = True) -> None:
    """Raises NoRoom if these bytes would nearly fill the disk of this folder: results need room too."""
    disk = os.fstatvfs(fd)
    kept = min(ROOM_BYTES, disk.f_blocks * disk.f_frsize // KEPT_SHARE)
    kept_files = min(ROOM_FILES, disk.f_files // KEPT_SHARE)  # 0 where a file system does not count them
    if disk.f_bavail * disk.f_frsize < kept + size or disk.f_favail < kept_files:
        raise NoRoom(is_new=is_new)


def finish_placing(parent: int, target: bytes, mark: Mark) -> None:
    """Give the complete temporary folder its name; it may be called again after a crash. A folder of another version is
    removed; files are added to one of the same version, as some may have left it. Raises OSError."""
    temporary = temporary_name(target)
    old, present = temporary_name(temporary), mark_of(parent, target)
    if present and present.version == mark.version:
        _merge(parent, temporary, target)
    elif exists(parent, target):
        remove(parent, old)
        os.rename(target, old, src_dir_fd=parent, dst_dir_fd=parent)
    if exists(parent, temporary):
        os.rename(temporary, target, src_dir_fd=parent, dst_dir_fd=parent)
    remove(parent, old)
    os.fsync(parent)


def _merge(parent: int, temporary: bytes, target: bytes) -> None:
    with opened(parent, target) as folder:
        for path, source in walk_files(parent, temporary):
            *folders, name = path.split(b"/")
            with made_inner(folder, folders) as inner:
                os.rename(name, name, src_dir_fd=source, dst_dir_fd=inner)
        os.rename(temporary + b"/" + MARK, MARK, src_dir_fd=parent, dst_dir_fd=folder)  # last
        remove(parent, temporary)
        sync_file_system(folder)


def choose_target(
    parent: int, names: Sequence[bytes], version: Version, *, moved: bool, replaces: bool
) -> tuple[bytes, Mark | None]:
    """Which of two names the folder gets: the first, unless it is somebody else's or (without `replaces`) still has
    files of an earlier version; and its mark, if it is of this version. If a daemon was killed when its folder was
    complete, but had not got its name yet, it gets it now. Raises OSError."""
    for name in names:
        mark = mark_of(parent, temporary_name(name))
        if mark and mark.is_of(version, moved=moved):
            finish_placing(parent, name, mark)
        if (mark := mark_of(parent, name)) and mark.is_of(version, moved=moved):
            return name, mark
    first, second = names
    if exists(parent, first):
        is_free = mark_of(parent, first) and (replaces or not any(walk_files(parent, first)))
        return (first if is_free else second), None
    return first, None


def mark_of(parent: int, name: bytes) -> Mark | None:
    """The mark of a folder; None if it has none, or does not exist."""
    try:
        with opened(parent, name) as folder, open(os.open(MARK, READ, dir_fd=folder), "rb") as file:
            return msgspec.json.decode(file.read(MARK_BYTES), type=Mark)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
