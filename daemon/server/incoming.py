"""Files that programs upload into an inbox: written whole under a hidden name, made durable, then renamed.

The name of such a file ends with a digest of its bytes. So a program that got no answer sends the same file again: it
gets the same name, and there is one image. And no file replaces another one. From then on it is a file of its inbox.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, BinaryIO

import anyio
from aiofiles.threadpool import wrap
from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from daemon.config.ignored import ignored_by
from daemon.config.sections import Inbox
from daemon.core.errors import VisiondError
from daemon.system.beneath import READ, rename_to_free
from daemon.system.mounts import KnownFolder
from daemon.unpacking.folder import check_room
from daemon.unpacking.kinds import kind_of
from stages.contract.base import ImageError
from stages.images.formats import HEAD, identify

HIDDEN = b".visiond-uploads"  # a folder in the inbox that it ignores, as all names of the daemon's own
DIGITS = 32  # of the digest, in a name
WRITE_BYTES = 256 << 10  # at once, of a file; a smaller one is written when all of it is here
STEM_BYTES = 100  # of the name that a program gave
INSIDE = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# exFAT and SMB refuse the last ones.
UNSAFE = re.compile('[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069:*?"<>|]')
SUFFIXES = {"JPEG": ".jpg", "TIFF": ".tif", "HEIF": ".heic"}  # of others: the name of the format
# How files begin that are unpacked, and the suffix of one that was given no name.
MARKS = (
    ("zip", 0, b"PK\3\4", ".zip"),
    ("zip", 0, b"PK\5\6", ".zip"),
    ("pdf", 0, b"%PDF-", ".pdf"),
    ("tar", 257, b"ustar", ".tar"),
    ("tar", 0, b"\x1f\x8b", ".tar.gz"),
    ("tar", 0, b"BZh", ".tar.bz2"),
    ("tar", 0, b"\xfd7zXZ", ".tar.xz"),
    ("video", 4, b"ftyp", ".mp4"),
    ("video", 0, b"\x1a\x45\xdf\xa3", ".mkv"),
    ("video", 0, b"RIFF", ".avi"),
    ("video", 0, b"\0\0\1\xba", ".mpg"),
    ("video", 0, b"\0\0\1\xb3", ".mpg"),
    ("video", 0, b"\x30\x26\xb2\x75", ".wmv"),
)


class NameTaken(Exception):
    """A file of this name has other bytes: somebody has changed it since."""


class UploadTooLarge(Exception):
    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"the file has more than {most_bytes:,} bytes ([page] upload_bytes)")


def choose_suffix(name: str, head: bytes, unpacked: Collection[str]) -> str:
    """The suffix of a file that begins with these bytes. name: as the program gave it. unpacked: the kinds of files that the
    inbox unpacks. Raises ImageError for a file that the inbox would not read, whatever its name says."""
    try:
        found = identify(memoryview(head))
    except ImageError:
        kinds = [(kind, suffix) for kind, at, mark, suffix in MARKS if head.startswith(mark, at)]
        named = kind_of(os.fsencode(name), unpacked)
        for kind, suffix in kinds:
            if kind == named:
                return _suffix_of(name)
            if kind in unpacked:
                return suffix
        raise
    return SUFFIXES.get(found, f".{found.lower()}")


def _suffix_of(name: str) -> str:
    """That of an archive; of a.tar.gz both."""
    stem, suffix = os.path.splitext(name.lower())
    return f".tar{suffix}" if stem.endswith(".tar") else suffix


def clean(name: str) -> str:
    """What is left of a name that a program gave, without folders and suffix; may be empty."""
    last = re.split(r"[/\\]", UNSAFE.sub("", name.encode(errors="replace").decode()))[-1]
    stem = os.path.splitext(last.strip(" ."))[0].removesuffix(".tar").strip(" .~$")
    return stem.encode()[:STEM_BYTES].decode(errors="ignore").strip(" .")


class _Kept(io.FileIO):
    """A file that leaves room on its disk for results and the ledger, also where nobody has said how long it is."""

    def write(self, data: Any) -> int:
        """Raises NoRoom, OSError."""
        check_room(self.fileno(), len(data))
        return super().write(data)


class Incoming:
    """A file that is being received. A small one is in memory until `Receiver.commit`; of a larger one only its end is."""

    def __init__(self, given: str, most_bytes: int, unpacked: Collection[str]) -> None:
        """given: the name that the program gave it, or empty. unpacked: the kinds of files that the inbox unpacks."""
        self.size = 0  # bytes so far
        self.unwritten = bytearray()
        self.file: BinaryIO | None = None
        self.temporary = b""  # its name in the hidden folder, while it has one
        self.name = ""  # in the inbox, when all of it is here
        self.digest = ""  # likewise, hexadecimal
        self.given, self._most_bytes, self._unpacked = given, most_bytes, unpacked
        self._suffix = ""
        self._hash = hashlib.sha256()

    def add(self, part: bytes) -> None:
        """Raises ImageError and UploadTooLarge as soon as that is known."""
        self.size += len(part)
        if self.size > self._most_bytes:
            raise UploadTooLarge(self._most_bytes)
        self._hash.update(part)
        self.unwritten += part
        if not self._suffix and self.size >= HEAD:
            self._suffix = choose_suffix(self.given, bytes(self.unwritten[:HEAD]), self._unpacked)

    def finish(self) -> None:
        """Raises ImageError."""
        if not self._suffix:
            self._suffix = choose_suffix(self.given, bytes(self.unwritten), self._unpacked)
        self.digest = self._hash.hexdigest()
        self.name = "~".join(filter(None, (clean(self.given), self.digest[:DIGITS]))) + self._suffix


@dataclass(slots=True)
class Upload:
    """The files of one request, all of them here. problem: why they are not placed."""

    files: Sequence[Incoming]
    is_placed: bool = False
    problem: Exception | None = None


class Receiver:
    """The uploads of one inbox. What may block runs in threads."""

    def __init__(self, settings: Inbox, has_taken: Callable[[bytes, str], bool]) -> None:
        """has_taken: whether the daemon has moved or deleted a file of this name, with this digest (hexadecimal)."""
        self.settings = settings
        self._has_taken = has_taken
        self._ignored = ignored_by(settings.ignore)
        self._known = KnownFolder(settings.root)
        self._ours = b"%d-%b" % (os.getpid(), secrets.token_hex(4).encode())  # begins the hidden names
        self._numbers = itertools.count()
        self._waiting: list[Upload] = []
        self._placing = anyio.Lock()

    async def write(self, each: Incoming, threads: Executor) -> None:
        """What is in memory. Its file is begun. Raises OSError, NoRoom."""
        part, each.unwritten = bytes(each.unwritten), bytearray()
        await wrap(each.file, executor=threads).write(part)

    def begin(self, each: Incoming, announced: int) -> None:
        """announced: bytes that are on their way to the disk. Raises OSError, NoRoom, FolderAway."""
        self._known.check()
        with self._opened() as (inbox, hidden):
            self._begin(each, announced, inbox, hidden)

    def _begin(self, each: Incoming, announced: int, inbox: int, hidden: int) -> None:
        check_room(inbox, announced)
        temporary = b"%b-%d" % (self._ours, next(self._numbers))
        made = os.open(temporary, NEW, 0o666, dir_fd=hidden)
        each.file, each.temporary = io.BufferedWriter(_Kept(made, "wb")), temporary
        _hand_over(made, inbox)

    def flush(self, files: Sequence[Incoming], announced: int) -> None:
        """All of them are on the disk then, under hidden names, and closed. Raises OSError, NoRoom, FolderAway."""
        self._known.check()
        with self._opened() as (inbox, hidden):
            for each in files:
                if each.file is None:
                    self._begin(each, announced, inbox, hidden)
                assert each.file
                if not each.file.closed:
                    each.file.write(each.unwritten)
                    each.unwritten.clear()
                    each.file.flush()
                    os.fsync(each.file.fileno())
                    each.file.close()

    async def commit(self, files: Sequence[Incoming], limiter: CapacityLimiter) -> None:
        """Give the files of a request their names, durably. Requests that come meanwhile share the next flush of the inbox.
        Raises OSError, NameTaken, LedgerUnusable."""
        upload = Upload(files)
        self._waiting.append(upload)
        # Meanwhile others gather. And where a rename may replace a file, as on NFS, those with the same bytes do not.
        async with self._placing:
            if not upload.is_placed:
                # Not in `_waiting`, if a group that it was in came to nothing.
                group = [upload, *(each for each in self._waiting if each is not upload)]
                self._waiting.clear()
                await run_sync(self.place, group, limiter=limiter)
        if upload.problem:
            raise upload.problem

    def place(self, uploads: Sequence[Upload]) -> None:
        """One call at a time. Files that have their names when something goes wrong keep them."""
        try:
            with self._opened() as (inbox, hidden):
                for upload in uploads:
                    try:
                        for each in upload.files:
                            self._name(each, inbox, hidden)
                    except (OSError, NameTaken, VisiondError) as error:  # the other requests go on
                        upload.problem = error
                os.fsync(inbox)
        except OSError as error:
            for upload in uploads:
                upload.problem = upload.problem or error
        for upload in uploads:
            upload.is_placed = True

    def _name(self, each: Incoming, inbox: int, hidden: int) -> None:
        name = os.fsencode(each.name)
        try:
            there = os.open(name, READ, dir_fd=inbox)
        except FileNotFoundError:
            if self._has_taken(name, each.digest):
                return
            with contextlib.suppress(FileExistsError):  # another program was faster
                rename_to_free(each.temporary, name, src_dir_fd=hidden, dst_dir_fd=inbox)
                each.temporary = b""
                return
            there = os.open(name, READ, dir_fd=inbox)
        with open(there, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != each.digest:
                raise NameTaken(f"{each.name} is in the inbox and has other bytes: somebody has changed it.")

    def ignores(self, each: Incoming) -> bool:
        """Whether the inbox would never read it."""
        return self._ignored.hides(os.fsencode(each.name))

    def discard(self, files: Sequence[Incoming]) -> None:
        """Close them, and remove those that have no names."""
        for each in files:
            with contextlib.suppress(OSError):  # a full disk
                if each.file:
                    each.file.close()
        if left := [each for each in files if each.temporary]:
            with contextlib.suppress(OSError), self._opened() as (_, hidden):
                for each in left:
                    with contextlib.suppress(OSError):  # the others go
                        os.unlink(each.temporary, dir_fd=hidden)

    def clear(self) -> None:
        """Remove what servers that were killed have left. Raises OSError."""
        if not os.path.lexists(os.path.join(self.settings.root, HIDDEN)):
            return
        with self._opened() as (_, hidden):
            for name in os.listdir(hidden):
                if not os.fsencode(name).startswith(self._ours) and not _is_written(name):
                    os.unlink(name, dir_fd=hidden)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[int, int]]:
        """Descriptors of the inbox and of the hidden folder in it, which is made if there is none. Raises OSError."""
        with contextlib.ExitStack() as opened:
            inbox = os.open(self.settings.root, os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, inbox)
            try:
                hidden = os.open(HIDDEN, INSIDE, dir_fd=inbox)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # another thread was faster
                    os.mkdir(HIDDEN, 0o700, dir_fd=inbox)
                hidden = os.open(HIDDEN, INSIDE, dir_fd=inbox)
                _hand_over(hidden, inbox)
            opened.callback(os.close, hidden)
            yield inbox, hidden


def _hand_over(made: int, inbox: int) -> None:
    """As root, to the owner of the inbox, as in daemon/system/ownership.py. Both are descriptors."""
    if os.geteuid() == 0:
        folder = os.fstat(inbox)
        # In a container without CAP_CHOWN, and on NFS, root is a user like others.
        with contextlib.suppress(PermissionError):
            os.fchown(made, folder.st_uid, folder.st_gid)


def _is_written(name: str) -> bool:
    """Whether another process that made a hidden file is still there. One of this number is this one, or its
    predecessor in another container."""
    number = int(found[0]) if (found := re.match(r"\d{1,9}(?=-)", name)) else 0
    if number in (0, os.getpid()):
        return False
    try:
        os.kill(number, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
