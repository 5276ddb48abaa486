"""The folders that the daemon uses: whether one is still the same, whether it answers, and whether it sends events."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shlex
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from daemon.system.scarcity import PASSING

T = TypeVar("T")

ANSWER_SECONDS = 2.0  # after that a folder is reported as not answering
NETWORK_FILE_SYSTEMS = re.compile(
    rb"nfs\d?|cifs|smb\d?|smbfs|9p|afs|ceph|glusterfs|lustre|beegfs|gpfs|fuse\..*|virtiofs|vboxsf"
)
_STATX = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)  # of the C library, since glibc 2.28
_AT_FDCWD, _NO_FOLLOW, _BASIC, _BORN = -100, 0x100, 0x7FF, 0x800  # fcntl.h, linux/stat.h
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def is_there(folder: Path) -> bool | None:
    """Whether the folder exists; None if its file system does not answer in time, or with an error that may pass."""

    def look() -> bool | None:
        try:
            os.stat(folder)
        except OSError as error:
            return None if error.errno in PASSING else False
        return os.path.isdir(folder)

    return ask(look)


def ask(look: Callable[[], T]) -> T | None:
    """What a function finds that looks at files; None if their file system does not answer in time,
    as with a dead network mount."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(look()), name="look", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return answers[0] if answers else None


def describe_missing(inbox: Path) -> str:
    """Why an inbox is not a folder, and the fix."""
    if os.path.lexists(inbox) and not os.path.islink(inbox):
        return f"inbox {inbox} is a file; it must be the folder that images are dropped into."
    return (
        f"inbox {inbox} does not exist; create it ({shlex.join(['mkdir', '-p', str(inbox)])}), or mount it."
    )


def describe_in_the_way(folder: Path) -> str:
    """What keeps a path from being a folder, or from becoming one, and the fix; empty if nothing does. What may pass, and what
    this user may not look at, is not in the way."""
    for path in (folder, *folder.parents):
        try:
            os.lstat(path)
            return (
                ""
                if stat.S_ISDIR(os.stat(path).st_mode)
                else f"{path} is a file; remove it, or name another folder"
            )
        except OSError as error:
            if error.errno not in _GONE:
                return ""
            if os.path.islink(path):
                if error.errno == errno.ELOOP:
                    return f"{path} is a link to itself; remove it"
                target = os.readlink(path)
                return f"{path} is a link to {target}, which does not exist; mount or create that, or remove the link"
    return ""


def describe_closed(folder: Path) -> str:
    """Why nothing can be written into a folder, which may not exist yet; "" if it can."""
    if why := describe_in_the_way(folder):
        return why
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable for this user"


def describe_obstacle(error: OSError, source: bytes, target: bytes) -> str:
    """Why a file cannot go from the source to the target, and the fix where it is known."""
    folder = os.fsdecode(os.path.dirname(target))
    if why := describe_in_the_way(Path(folder)):
        return why
    if os.path.isdir(target) and not os.path.islink(target):
        return f"{os.fsdecode(target)} is a folder; remove it"
    if error.errno in (errno.EINVAL, errno.EILSEQ):  # as exFAT and SMB a colon
        return f"the disk of {folder} refuses its name; rename the file"
    if error.errno == errno.EACCES:
        for each in (os.fsdecode(os.path.dirname(source)), folder):
            if os.path.isdir(each) and not os.access(each, os.W_OK | os.X_OK):
                return f"{each} is not writable for this user"
    return error.strerror or str(error)


class Mount(NamedTuple):
    """A mounted file system. device: its number as text; root: the folder in it that is mounted."""

    place: bytes
    kind: bytes
    device: bytes
    root: bytes


def list_mounts() -> list[Mount]:
    def plain(field: bytes) -> bytes:  # proc(5): blanks are octal
        return field.decode("unicode_escape").encode("latin-1")

    mounts = []
    for line in Path("/proc/self/mountinfo").read_bytes().rstrip(b"\n").split(b"\n"):
        fields, _, kind = line.partition(b" - ")
        # Only at spaces: a carriage return, for example, is part of a name.
        _, _, device, root, place, *_ = fields.split(b" ")
        mounts.append(Mount(plain(place), kind.split(b" ")[0], device, plain(root)))
    return mounts


def mount_of(path: Path) -> Mount | None:
    """The mount that a folder is on, whether or not the folder exists."""
    # unlike Path.resolve, this raises nothing for a link to itself
    target = os.fsencode(os.path.realpath(path))
    holding = [mount for mount in list_mounts() if is_within(target, mount.place)]
    # Of two at one place, the later one covers the other.
    return max(enumerate(holding), key=lambda each: (len(each[1].place), each[0]))[1] if holding else None


def is_within(path: bytes, folder: bytes) -> bool:
    """Whether an absolute path is in a folder, or is that folder."""
    return (path + b"/").startswith(os.path.join(folder, b""))


@dataclass(frozen=True, slots=True)
class Position:
    """Where a folder really is. folders: device and inode of it, if it exists, and of all folders above it; the first is
    its own. place: where its file system has it, with the device's number before it: another name of a folder, made by
    a mount of that folder alone, has no folder above it in common. Empty for network mounts: NFS states no such place."""

    own: tuple[int, int] | None
    folders: frozenset[tuple[int, int]]
    place: bytes

    @classmethod
    def of(cls, path: Path) -> Position:
        real = Path(os.path.realpath(path))
        found = [(status.st_dev, status.st_ino) for each in (real, *real.parents) if (status := _stat(each))]
        own = found[0] if _stat(real) else None
        mount = mount_of(real)
        place = (
            mount.device
            + os.path.normpath(os.path.join(mount.root, os.path.relpath(os.fsencode(real), mount.place)))
            if mount and not NETWORK_FILE_SYSTEMS.fullmatch(mount.kind)
            else b""
        )
        return cls(own, frozenset(found), place)

    def is_within(self, other: Position) -> bool:
        """Whether it is the other folder or in it, under whatever names."""
        return other.own in self.folders or (bool(other.place) and is_within(self.place, other.place))


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def is_network_mount(path: Path) -> bool:
    """Whether a folder is on a network file system, which sends no events for changes by other machines."""
    mount = mount_of(path)
    return bool(mount and NETWORK_FILE_SYSTEMS.fullmatch(mount.kind))


class FolderAway(OSError):
    """A folder is missing, or another one has its place: it was unmounted or renamed. Otherwise an empty folder would take
    every new file, or would look as if all files had been deleted."""


class FolderIdentity(NamedTuple):
    """born: when it was made, in Unix nanoseconds; 0 if its file system does not say."""

    device: int
    inode: int
    born: int

    @classmethod
    def of_file(cls, path: bytes) -> FolderIdentity:
        """The same of a file. Raises OSError."""
        return cls.of(path, _NO_FOLLOW)

    @classmethod
    def of(cls, path: bytes, flags: int = 0) -> FolderIdentity:
        """Raises OSError."""
        if not flags:
            path = os.path.join(path, b".")  # so that an automatic mount is mounted first
        found = ctypes.create_string_buffer(256)  # struct statx
        if _STATX is None or _STATX(_AT_FDCWD, path, flags, _BASIC | _BORN, found):
            # With the same error; or the call is missing or not allowed.
            status = os.stat(path, follow_symlinks=not flags)
            return cls(status.st_dev, status.st_ino, 0)
        mask, inode = struct.unpack_from("=I28xQ", found)
        seconds, nanoseconds = struct.unpack_from("=qI", found, 80)
        born = seconds * 10**9 + nanoseconds if mask & _BORN else 0
        return cls(os.makedev(*struct.unpack_from("=II", found, 136)), inode, born)

    def is_same(self, other: FolderIdentity) -> bool:
        """The number of a device may be another after it was mounted again, and a number of an inode is used again: the
        moment at which a folder was made shows both."""
        if self.inode != other.inode:
            return False
        return self.born == other.born if self.born and other.born else self.device == other.device


@dataclass(slots=True)
class KnownFolder:
    """A folder as it was when it was first looked at.

    found: its path and identity. Until it exists, those of the nearest folder above it that does. Together, as several threads
    may look at once.
    """

    path: bytes
    found: tuple[bytes, FolderIdentity] | None = None
    is_overlay: bool = False

    @property
    def was_missing(self) -> bool:
        """Whether it did not exist when it was last looked at."""
        return self.found is not None and self.found[0] != self.path

    def check(self) -> None:
        """Raises FolderAway if it is not the same any more; OSError."""
        if self.found is None:
            self.accept()
            return
        place, identity = self.found
        try:
            now = FolderIdentity.of(place)
        except OSError as error:
            if error.errno in _GONE:
                raise _away(place, "is gone", "make a new one, and restart the daemon") from error
            raise
        if now != identity and not now.is_same(identity) and not self._is_mounted_again(now):
            raise _away(
                place, "is not the folder that it was; perhaps its mount is missing", "restart the daemon"
            )
        if self.was_missing and self._find_nearest() != place:
            self.accept()  # it exists by now, or one above it does

    def _find_nearest(self) -> bytes:
        place = self.path
        while not os.path.isdir(place) and place != b"/":
            place = os.path.dirname(place)
        return place

    def accept(self) -> None:
        """Remember what is there now. Raises OSError."""
        place = self._find_nearest()
        if self.found is None or place != self.found[0]:
            mount = mount_of(Path(os.fsdecode(place)))
            self.is_overlay = bool(mount and mount.kind == b"overlay")
        identity = FolderIdentity.of(place)
        if self.is_overlay:  # the first write copies a folder, which is then born again
            identity = identity._replace(born=0)
        self.found = place, identity

    def _is_mounted_again(self, now: FolderIdentity) -> bool:
        """Network mounts get another device number each time, and some do not say when a folder was made."""
        assert self.found
        place, identity = self.found
        is_likely = now.inode == identity.inode and not (now.born and identity.born)
        if is_likely and is_network_mount(Path(os.fsdecode(place))):
            self.found = place, now
            return True
        return False


def _away(place: bytes, what: str, accept: str) -> FolderAway:
    """accept: what to do if nothing is to come back."""
    fix = "Mount it or move it back, and work goes on"
    return FolderAway(f"{os.fsdecode(place)} {what}. {fix}; if that is on purpose, {accept}")


def find_existing(folder: Path) -> Path:
    """The folder, or the nearest of those above it that exists. Raises OSError."""
    return next(path for path in (folder, *folder.parents) if path.exists())
