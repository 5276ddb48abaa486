"""Reads each file once, straight into the slab, and computes its digest.
It never reads another version than the ledger's."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping, Sequence

from daemon.jobs import Failure, Job
from daemon.system.beneath import READ, open_beneath
from daemon.system.scarcity import AWAY, SCARCE
from daemon.workers.slab import Slab
from stages.base import Reason

_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.ESTALE)


def read_files(jobs: Sequence[Job], slab: Slab, roots: Mapping[int, bytes]) -> None:
    """Read each job's file into its extent and set its digest; else its `failure`, or `gone` when
    the file has changed since it was seen. `roots` are the inboxes' folders. Runs in a thread.

    Raises OSError if no file at all can be read for now. It may then be called again."""
    for job in jobs:
        job.digest, job.failure, job.gone = b"", None, False  # from a call that ended before it had read all
        try:
            _read(job, slab, roots)
        except OSError as error:
            if error.errno in SCARCE:
                raise
            if error.errno in _VANISHED:
                job.gone = True
            else:
                transient = not isinstance(error, PermissionError)
                away = error.errno in AWAY or (error.errno == errno.EIO and not _answers(roots[job.inbox]))
                job.failure = Failure(Reason.UNREADABLE, f"{error.strerror}", transient, away)


def _answers(folder: bytes) -> bool:
    """Whether a folder can be listed. A bad sector is the problem of one file, a disk that is gone is not."""
    try:
        with os.scandir(folder) as entries:
            next(entries, None)
    except OSError:
        return False
    return True


def _read(job: Job, slab: Slab, roots: Mapping[int, bytes]) -> None:
    assert job.extent is not None
    fd = os.open(job.location, READ) if job.location else open_beneath(roots[job.inbox], job.path)
    try:
        if not job.version.is_of(os.fstat(fd), moved=bool(job.location)):
            job.gone = True
            return
        window = slab.window(job.extent)
        filled = 0
        while filled < len(window) and (count := os.preadv(fd, [window[filled:]], filled)):
            filled += count
        # A file that changed while it was read is another version, even if its size is the same.
        if filled < len(window) or not job.version.is_of(os.fstat(fd), moved=bool(job.location)):
            job.gone = True
            return
        job.digest = hashlib.sha256(window).digest()
    finally:
        os.close(fd)
