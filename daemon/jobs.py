"""The nouns of the daemon: a version of a file, a job, and the states it can be in."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from daemon.messages import Output
from stages.base import Reason


class JobStatus(IntEnum):
    """PENDING becomes one of the others, once. Only a person puts FAILED (`retry`) or DONE (`redo`) back to it.

    A lease is a matter of the daemon's memory, never of the ledger.
    """

    PENDING = 0
    DONE = 1
    FAILED = 2
    SKIPPED = 3
    GONE = 4  # deleted or replaced before it was read


class Version(NamedTuple):
    """One version of a file's content; a change of any field makes it another image.

    The device's number is no such field: a disk may have another after a reboot, and two disks the same in turn.
    """

    inode: int
    size: int  # bytes
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Version:
        figures = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        # SQLite's integers have 64 bits and a sign. Inodes may use all 64, and times after 2262 need more.
        return cls(*((figure + 2**63) % 2**64 - 2**63 for figure in figures))

    def is_of(self, status: os.stat_result, *, moved: bool) -> bool:
        """Whether a file is this version. moved: the daemon has put it where it lies. Its change time is that of the
        renaming then, or of its rights being mended, so that it can be tried again; in its inbox the change time tells what
        the times that a program can set do not."""
        now = Version.of(status)
        return stat.S_ISREG(status.st_mode) and self == (now._replace(ctime_ns=self.ctime_ns) if moved else now)


class File(NamedTuple):
    """A file as found in an inbox. `inbox` is the inbox's number in the ledger, `path` is relative to it."""

    inbox: int
    path: bytes
    version: Version
    regular: bool = True  # else a link, FIFO, socket or device, which is never opened


class Admitted(NamedTuple):
    """What became of files that were admitted; versions the ledger knew already count nowhere."""

    pending: int
    skipped: int
    replaced: int  # older versions that were still pending, now GONE
    failures_replaced: int = 0  # versions that had FAILED, of which these are the next
    results_kept: int = 0  # older versions that were to be annotated anew and have the result they had, DONE


class Extent(NamedTuple):
    """A stretch of the slab."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job has no result: for good or, when `transient`, for this time. `away`: what holds the file is not there at
    present, so the try does not count."""

    reason: Reason
    detail: str
    transient: bool = False
    away: bool = False


@dataclass(slots=True)
class Job:
    """One version of one file on its way from PENDING to its end."""

    id: int
    inbox: int
    path: bytes  # relative to the inbox
    location: bytes  # absolute: where the file lies now (a failed file may have been moved)
    version: Version
    attempts: int
    seen_at: float  # Unix seconds
    deaths: int = 0  # workers that died on it alone
    has_result: bool = False  # which is kept until there is another
    fed_at: float = 0.0  # monotonic seconds
    extent: Extent | None = None  # where its bytes are in the slab
    digest: bytes = b""
    format: str = ""
    width: int = 0  # pixels, upright
    height: int = 0
    pages: int = 1  # pictures in the file, of which the first is read
    outputs: dict[str, Output] = field(default_factory=dict)  # by stage name
    failure: Failure | None = None
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """How a try of a job ends. PENDING: it is to be tried again, not before `not_before`."""

    job: Job
    status: JobStatus
    at: float  # Unix seconds
    attempts: int
    bin: str = ""
    criteria: bytes = b""  # JSON
    failure: Failure | None = None
    not_before: float = 0.0  # Unix seconds, by clock.py

    @property
    def keeps_result(self) -> bool:
        """Whether the image is DONE by the result that it had, as there is nothing left to read."""
        return self.status is JobStatus.GONE and self.job.has_result


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a finished image's file lies now that its sidecar is written; None: where it was."""

    id: int
    location: bytes | None = None
    version: Version | None = None
