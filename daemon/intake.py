"""Reading files: once, straight into the slab, with their digest; and never a version other than the ledger's."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import stat
import struct
from collections.abc import Mapping, Sequence

from daemon.errors import SCARCE
from daemon.jobs import Failure, Job, Version
from daemon.slab import Slab
from stages.base import Reason

# A link is refused rather than followed, and a FIFO that took the file's place does not block us.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.ESTALE)

OPENAT2, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 437, 0x04, 0x08
_HOW = struct.pack("QQQ", _FLAGS, 0, RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH)  # struct open_how
_libc = ctypes.CDLL(None, use_errno=True)


def read_files(jobs: Sequence[Job], slab: Slab, roots: Mapping[int, bytes]) -> None:
    """Read each job's file into its extent and set its digest; else its `failure`, or `gone` when the file has
    changed since it was seen. `roots` are the inboxes' folders. Runs in a thread.

    Raises OSError where no file could be read for now, whichever it is; then it may be called again."""
    for job in jobs:
        try:
            _read(job, slab, roots)
        except OSError as error:
            if error.errno in SCARCE:
                raise
            if error.errno in _VANISHED:
                job.gone = True
            else:
                transient = not isinstance(error, PermissionError)
                job.failure = Failure(Reason.UNREADABLE, f"{error.strerror}", transient)


def _read(job: Job, slab: Slab, roots: Mapping[int, bytes]) -> None:
    assert job.extent is not None
    fd = os.open(job.location, _FLAGS) if job.location else _open_beneath(roots[job.inbox], job.path)
    try:
        if not _is_version(fd, job.version):
            job.gone = True
            return
        window = slab.window(job.extent)
        filled = 0
        while filled < len(window) and (count := os.preadv(fd, [window[filled:]], filled)):
            filled += count
        # What changed while it was read is not the version we were to read, whatever its size.
        if filled < len(window) or not _is_version(fd, job.version):
            job.gone = True
            return
        job.digest = hashlib.sha256(window).digest()
    finally:
        os.close(fd)


def _open_beneath(root: bytes, path: bytes) -> int:
    """Open a file in an inbox, where no folder on the way may be a link either: who delivers images could lay one to a
    folder that only the daemon may read. Raises OSError."""
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd: int = _libc.syscall(OPENAT2, folder, path, _HOW, len(_HOW))
        if fd < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):  # before Linux 5.6, or an old container's filter
            return os.open(path, _FLAGS, dir_fd=folder)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        return fd
    finally:
        os.close(folder)


def _is_version(fd: int, version: Version) -> bool:
    status = os.fstat(fd)
    return stat.S_ISREG(status.st_mode) and Version.of(status) == version
