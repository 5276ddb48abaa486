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
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
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
from stages.contract.processes import read_stat
from stages.images.formats import HEAD, identify

HIDDEN = b".visiond-uploads"  # a folder in the inbox that it ignores, as all names of the daemon's own
DIGITS = 32  # of the digest, in a name
WRITE_BYTES = 256 << 10  # at once, of a file; a smaller one is written when all of it is here
FILES_AT_ONCE = 16  # that are open while a group is written
SLOW_SECONDS = (
    0.002  # if the files that are open take longer to flush, the next ones are flushed side by side
)
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
    """A file that is being received. A small one is in memory until `Receiver.place`; of a larger one only its end is."""

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

    def flush(self) -> None:
        """The end of a file that is begun: all of it is on the disk then, under its hidden name, and it is closed. Raises
        OSError, NoRoom."""
        assert self.file
        self.file.write(self.unwritten)
        self.unwritten.clear()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


@dataclass(slots=True)
class Upload:
    """The files of one request, all of them here. problem: why they are not placed."""

    files: Sequence[Incoming]
    is_placed: bool = False
    problem: Exception | None = None

    @contextlib.contextmanager
    def trouble(self) -> Iterator[None]:
        """What goes wrong is this upload's problem: others go on."""
        try:
            yield
        except (OSError, NameTaken, VisiondError) as error:
            self.problem = error


@dataclass(slots=True)
class Group:
    """Uploads that are placed together, by the first of them."""

    uploads: list[Upload] = field(default_factory=list)
    ended: anyio.Event = field(default_factory=anyio.Event)


class Receiver:
    """The uploads of one inbox. What may block runs in threads."""

    def __init__(self, settings: Inbox, has_taken: Callable[[bytes, str], bool]) -> None:
        """has_taken: whether the daemon has moved or deleted a file of this name, with this digest (hexadecimal)."""
        self.settings = settings
        self._has_taken = has_taken
        self._ignored = ignored_by(settings.ignore)
        self._known = KnownFolder(settings.root)
        ours, token = os.getpid(), secrets.token_hex(4)
        self._ours = f"{ours}-{started_at(ours)}-{token}".encode()  # begins the hidden names
        self._numbers = itertools.count()
        self._gathering = Group()
        self._placing = anyio.Lock()
        self._is_slow = False  # the disk
        self._flushers = ThreadPoolExecutor(FILES_AT_ONCE, "flush")

    async def write(self, each: Incoming, threads: Executor) -> None:
        """What is in memory. Its file is begun. Raises OSError, NoRoom."""
        part, each.unwritten = bytes(each.unwritten), bytearray()
        await wrap(each.file, executor=threads).write(part)

    def begin(self, each: Incoming, announced: int) -> None:
        """announced: bytes that are on their way to the disk. Raises OSError, NoRoom, FolderAway."""
        self._known.check()
        with self._opened() as (inbox, hidden):
            check_room(inbox, announced)
            each.file = io.BufferedWriter(_Kept(self._make(each, inbox, hidden), "wb"))

    def _make(self, each: Incoming, inbox: int, hidden: int) -> int:
        """A descriptor of a new file with a hidden name."""
        temporary = b"%b-%d" % (self._ours, next(self._numbers))
        made = os.open(temporary, NEW, 0o666, dir_fd=hidden)
        each.temporary = temporary
        _hand_over(made, inbox)
        return made

    async def commit(self, files: Sequence[Incoming], announced: int, limiter: CapacityLimiter) -> None:
        """Write what is in memory of a request, and give its files their names, durably. Requests that come meanwhile are the
        next group: they share a hop to a thread and a flush of the inbox. announced: bytes that are on their way to the disk.
        Raises OSError, NoRoom, FolderAway, NameTaken, LedgerUnusable."""
        upload = Upload(files)
        while not upload.is_placed:  # once more, if a group that it was in came to nothing
            group = self._gathering
            group.uploads.append(upload)
            if group.uploads[0] is not upload:
                await group.ended.wait()
                continue
            try:
                # Meanwhile others gather. And where a rename may replace a file, as on NFS, those with the same bytes do not.
                async with self._placing:
                    self._gathering = Group()
                    await run_sync(self.place, group.uploads, announced, limiter=limiter)
            finally:
                if self._gathering is group:  # cancelled before it began
                    self._gathering = Group()
                group.ended.set()
        if upload.problem:
            raise upload.problem

    def place(self, uploads: Sequence[Upload], announced: int = 0) -> None:
        """One call at a time. Files that have their names when something goes wrong keep them."""
        unwritten = [(upload, each) for upload in uploads for each in upload.files if each.unwritten]
        try:
            self._known.check()
            with self._opened() as (inbox, hidden):
                if unwritten:
                    check_room(inbox, max(announced, sum(each.size for _, each in unwritten)))
                for first in range(0, len(unwritten), FILES_AT_ONCE):
                    self._write(unwritten[first : first + FILES_AT_ONCE], inbox, hidden)
                for upload in uploads:
                    with upload.trouble():
                        for each in () if upload.problem else upload.files:
                            self._name(each, inbox, hidden)
                os.fsync(inbox)
        except OSError as error:
            for upload in uploads:
                upload.problem = upload.problem or error
        for upload in uploads:
            upload.is_placed = True

    def _write(self, files: Sequence[tuple[Upload, Incoming]], inbox: int, hidden: int) -> None:
        """Files that are in memory. They are on the disk then, under hidden names, or their uploads have a problem."""
        with contextlib.ExitStack() as opened:
            written = []
            for upload, each in files:
                assert each.file is None, "a file that was begun is flushed before"
                with upload.trouble():
                    opened.callback(os.close, made := self._make(each, inbox, hidden))
                    _write_all(made, each.unwritten)
                    written.append((upload, each, made))

            def flush(one: tuple[Upload, Incoming, int]) -> None:
                upload, each, made = one
                with upload.trouble():
                    os.fsync(made)
                    each.unwritten.clear()

            # Threads wait for the interpreter lock too: one alone is faster, unless the disk is slow.
            began = time.monotonic()
            for _ in self._flushers.map(flush, written) if self._is_slow else map(flush, written):
                pass
            self._is_slow = time.monotonic() - began > SLOW_SECONDS

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

    def clear(self) -> bool:
        """Remove what servers that were killed have left. Returns whether another one still writes here. Raises OSError."""
        if not os.path.lexists(os.path.join(self.settings.root, HIDDEN)):
            return False
        is_written = False
        with self._opened() as (_, hidden):
            for name in os.listdir(hidden):
                if os.fsencode(name).startswith(self._ours):
                    continue
                if _is_written(name):
                    is_written = True
                else:
                    with contextlib.suppress(FileNotFoundError):  # another server was faster
                        os.unlink(name, dir_fd=hidden)
        return is_written

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


def _write_all(file: int, data: bytearray) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _hand_over(made: int, inbox: int) -> None:
    """As root, to the owner of the inbox, as in daemon/system/ownership.py. Both are descriptors."""
    if os.geteuid() == 0:
        folder = os.fstat(inbox)
        # In a container without CAP_CHOWN, and on NFS, root is a user like others.
        with contextlib.suppress(PermissionError):
            os.fchown(made, folder.st_uid, folder.st_gid)


def _is_written(name: str) -> bool:
    """Whether the process that made a hidden file is still there. Another one with its number has started at another time."""
    made_by = re.match(r"([1-9]\d{0,8})-([1-9]\d*)-", name)
    return made_by is not None and started_at(int(made_by[1])) == int(made_by[2])


def started_at(process: int) -> int:
    """Clock ticks since the machine started, by proc(5); 0 if it has ended, though perhaps no parent has collected it yet."""
    fields = read_stat(process)
    return int(fields[19]) if fields and fields[0] not in (b"Z", b"X") else 0
