"""Opens, makes, walks and removes folders in an inbox, each from the one above it and without following links, and makes
plain paths of the names in a container."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence

from daemon.core.sidecar import LONGEST_NAME
from daemon.system.beneath import READ

MARK = b".visiond-unpacked"  # a file in each such folder; the watcher ignores it
INNER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
DEEPEST = 100  # folders in each other: what removes or walks them calls itself for each
SEPARATORS, SLASHES = re.compile(rb"[/\\]+"), re.compile(rb"/+")
UNPRINTABLE = re.compile(rb"[\x00-\x1f\x7f]")


def walk_files(parent: int, name: bytes) -> Iterator[tuple[bytes, int]]:
    """The files in a folder and below, without its mark: their paths in it, each with a descriptor of its folder."""
    for folder, _, files, fd in os.fwalk(name, dir_fd=parent):
        inner = folder[len(name) + 1 :]
        for file in files:
            if (path := os.path.join(inner, file)) != MARK:
                yield path, fd


def exists(parent: int, name: bytes) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def remove(parent: int, name: bytes) -> None:
    """Remove a folder with all that is in it, or a file or link. What cannot be removed stays."""
    try:
        shutil.rmtree(name, dir_fd=parent)  # it follows no link
    except RecursionError:  # another program has made too many folders in each other
        pass
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=parent)


def allow_as(parent: int, folder: int) -> None:
    """Give a folder the permissions of the one that it is in: who may delete files there may do so here."""
    with contextlib.suppress(OSError):  # some file systems have none
        os.fchmod(folder, stat.S_IMODE(os.fstat(parent).st_mode))


@contextlib.contextmanager
def opened(parent: int, name: bytes) -> Iterator[int]:
    """A descriptor of a folder. Raises OSError, also for a link."""
    fd = os.open(name, INNER, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def open_below(parent: int, path: bytes) -> int:
    """A descriptor of a file below a folder. Raises OSError, also for a link."""
    with contextlib.ExitStack() as stack:
        *folders, name = path.split(b"/")
        for folder in folders:
            parent = stack.enter_context(opened(parent, folder))
        return os.open(name, READ, dir_fd=parent)


@contextlib.contextmanager
def made_inner(
    parent: int, names: Sequence[bytes], count: Callable[[], None] = lambda: None
) -> Iterator[int]:
    """A descriptor of a folder below another, which is made if it is missing; before that, `count` is called. Raises OSError,
    also for a link, and what `count` raises."""
    fd = os.dup(parent)
    try:
        for name in names:
            is_new = not exists(fd, name)
            if is_new:
                count()
                os.mkdir(name, dir_fd=fd)
            inner = os.open(name, INNER, dir_fd=fd)
            if is_new:
                allow_as(fd, inner)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


class FreePaths:
    """Gives each member of a container a path that no other file or folder has: a.png, a~2.png, a~3.png … The same at each
    attempt, as members that are dropped keep their names.

    bytes: of all paths so far.
    """

    def __init__(self, longest: int) -> None:
        """longest: path, in bytes."""
        self.bytes = 0
        self._longest = longest
        self._named: dict[bytes, int] = {}  # how many files and folders have had this path
        self._inner: dict[bytes, bytes] = {}  # each folder in the container → its path here
        # The latest file of a name → its path here, if that is another.
        self._renamed: dict[bytes, bytes] = {}

    def choose(self, path: bytes) -> bytes:
        """Where a file goes; empty if its path would be too long."""
        folder, _, name = path.rpartition(b"/")
        free = self._free(os.path.join(self._choose_folder(folder), name))
        if free != path:
            self._renamed[path] = free
        fits = len(free) <= self._longest and max(map(len, free.split(b"/"))) <= LONGEST_NAME
        return free if fits else b""

    def latest(self, path: bytes) -> bytes:
        """Where the latest file of this name has gone."""
        return self._renamed.get(path, path)

    def _choose_folder(self, path: bytes) -> bytes:
        if path and path not in self._inner:
            folder, _, name = path.rpartition(b"/")
            self._inner[path] = self._free(os.path.join(self._choose_folder(folder), name))
        return self._inner.get(path, b"")

    def _free(self, path: bytes) -> bytes:
        free, number = path, self._named.get(path, 0)
        while free in self._named:
            number += 1
            stem, suffix = os.path.splitext(path)
            free = b"%b~%d%b" % (stem, number, suffix)
        self._named[path] = max(number, 1)
        self._named.setdefault(free, 1)
        self.bytes += len(free)
        return free


def plain_path(name: bytes, longest: int) -> bytes:
    """A path of plain names for a member; empty if it can have none. Folders that lead upwards are left out. In an old code
    page, the byte of a backslash may be the second one of a letter; tools that write backslashes write UTF-8 or ASCII."""
    parts = [UNPRINTABLE.sub(b"_", part) for part in (SEPARATORS if is_utf_8(name) else SLASHES).split(name)]
    parts = [part for part in parts if part not in (b"", b".", b"..")]
    path = b"/".join(parts)
    fits = len(parts) <= DEEPEST and len(path) <= longest and max(map(len, parts), default=0) <= LONGEST_NAME
    return path if fits else b""


def is_utf_8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def printable(name: bytes) -> str:
    """A name for a message."""
    return UNPRINTABLE.sub(b"_", name[:LONGEST_NAME]).decode(errors="replace")
