"""A folder as the origin of images: see origin.py. Each file is read once, straight into the slab, and never another
version than the ledger's."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from daemon.core.errors import SourceChanged
from daemon.core.jobs import GONE, Extent, Failure, Job, Read, Version
from daemon.core.slab import Slab
from daemon.inbox.walk import Listed, Walk
from daemon.ledger.record import Record
from daemon.system.beneath import READ, open_beneath
from daemon.system.mounts import ANSWER_SECONDS, FolderIdentity, is_network_mount, is_there
from daemon.system.scarcity import AWAY, SCARCE
from stages.contract.base import Reason
from stages.contract.processes import count_cores

_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.ESTALE)
SILENT_SECONDS = 30.0  # that any call after the first may take
READERS = 4  # threads that read and digest one group
READER_CORES = 4  # for each of these; the others decode and publish
READER_BYTES = 8 << 20  # of a group, for each of these after the first
NETWORK_READERS = 16  # on a network mount, where they wait for answers and not for cores


class FolderOrigin:
    is_remote, settles, is_ordered = False, True, False
    answer_seconds = (ANSWER_SECONDS, SILENT_SECONDS)

    def __init__(self, root: bytes) -> None:
        self._root = root

    def is_there(self) -> bool | None:
        return is_there(Path(os.fsdecode(self._root)))

    def sends_events(self) -> bool:
        return not is_network_mount(Path(os.fsdecode(self._root)))

    def files(self, walk: Walk, subtree: bytes = b"") -> Iterator[Listed | None]:
        for entry in walk.files(subtree):
            yield (entry[0], Version.of(entry[1]), stat.S_ISREG(entry[1].st_mode)) if entry else None

    def read(self, jobs: Sequence[tuple[Job, Extent]], slab: Slab) -> dict[int, Read]:
        found: dict[int, Read] = {}
        if (count := self._count_readers(jobs)) > 1:
            rest = iter(jobs)  # each thread takes the next one
            with ThreadPoolExecutor(count, "read") as threads, contextlib.suppress(RuntimeError):
                for _ in range(count):  # or as many as the system allows
                    threads.submit(self._read_each, rest, slab, found)
        # An error ends only the thread that meets it: too few descriptors for all may be enough for one.
        self._read_each([each for each in jobs if each[0].id not in found], slab, found)
        return found

    def _count_readers(self, jobs: Sequence[tuple[Job, Extent]]) -> int:
        most, part = self._readers
        return min(most, len(jobs), 1 + sum(extent.length for _, extent in jobs) // part)

    @cached_property
    def _readers(self) -> tuple[int, int]:
        """The most threads that read a group, and how many bytes of it are worth one more."""
        if is_network_mount(Path(os.fsdecode(self._root))):
            return NETWORK_READERS, 1
        return max(1, min(READERS, count_cores() // READER_CORES)), READER_BYTES

    def _read_each(self, jobs: Iterable[tuple[Job, Extent]], slab: Slab, found: dict[int, Read]) -> None:
        for job, extent in jobs:
            # An error that is kept has frames, which may outlive the slab.
            with slab.window(extent) as window:
                try:
                    found[job.id] = self._read(job, window)
                except OSError as error:
                    if error.errno in SCARCE:  # it keeps every file from being read
                        raise
                    found[job.id] = self._explain(error)

    def _explain(self, error: OSError) -> Read:
        """Why a file could not be read."""
        if error.errno in _VANISHED:
            return GONE
        transient = not isinstance(error, PermissionError)
        # A bad sector is the problem of one file, a disk that is gone is not.
        away = error.errno in AWAY or (error.errno == errno.EIO and _has_entries(self._root) is None)
        return Read(failure=Failure(Reason.UNREADABLE, f"{error.strerror}", transient, away))

    def _read(self, job: Job, window: memoryview) -> Read:
        fd = os.open(job.location, READ) if job.location else open_beneath(self._root, job.path)
        try:
            if not job.version.is_of(os.fstat(fd), moved=bool(job.location)):
                return GONE
            filled = 0
            while filled < len(window) and (count := os.preadv(fd, [window[filled:]], filled)):
                filled += count
            # A file that changed while it was read is another version, even if its size is the same.
            if filled < len(window) or not job.version.is_of(os.fstat(fd), moved=bool(job.location)):
                return GONE
            return Read(hashlib.sha256(window).digest())
        finally:
            os.close(fd)

    def silent_seconds(self) -> float:
        return 0.0

    def read_source(self, record: Record) -> bytes:
        fd = os.open(record.location, READ) if record.has_moved else open_beneath(self._root, record.path)
        with open(fd, "rb") as file:
            if not record.version.is_of(os.fstat(fd), moved=record.has_moved):
                raise SourceChanged(errno.ESTALE, "the file has changed since", record.location)
            return file.read(record.version.size)

    def why_lost(self, record: Record) -> str:
        try:
            status = os.lstat(record.location)
        except OSError:
            return "the file is gone"
        same = record.version.is_of(status, moved=record.has_moved)
        return "" if same else "the file has changed since it was processed"


def why_not_deleted(root: bytes, path: bytes, seen_at: float) -> str:
    """Why a file of an inbox that is missing has not been deleted; empty if it may have been. seen_at: Unix seconds. A
    folder from which something was deleted since then was changed since then, and after it was made; an empty folder
    below a mount point was not."""
    folder = root
    try:
        for name in os.path.dirname(path).split(b"/"):
            inner = os.path.join(folder, name)
            if not os.path.isdir(inner) or os.path.islink(inner):
                break
            folder = inner
        status, born = os.stat(folder), FolderIdentity.of(folder).born
    except OSError as error:
        return error.strerror or str(error)
    is_fresh = born > seen_at * 1e9 and status.st_mtime_ns <= born
    if status.st_ctime >= seen_at and not is_fresh:
        return ""
    shown = os.fsdecode(folder).rstrip("/")
    return (
        f"nothing has been deleted from {shown} since its images were seen, so perhaps its mount is missing. Mount it or move "
        f"it back; if you deleted the images, type `{shlex.join(['touch', shown])}`"
    )


def _has_entries(folder: bytes) -> bool | None:
    """None if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return None
