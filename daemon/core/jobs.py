"""The data types of the daemon: a version of a file, a job, and its states.

Those of which there is one for every image are structs of msgspec: one is made, and sent to an executor, in a
fraction of the time that a dataclass takes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from enum import IntEnum
from typing import NamedTuple

import msgspec

from daemon.core.messages import Output
from stages.contract.base import Reason

# A file with such a suffix FAILS if it is not an image; any other file is only SKIPPED.
IMAGE_SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .mpo .jp2 .jxl .png .webp .gif .tif .tiff .bmp "
    b".avif .heic .heif .ppm .pgm .pbm .pnm .psd .svg".split()
)


class JobStatus(IntEnum):
    """PENDING becomes one of the others, once. Only a person can set FAILED (`retry`) or DONE (`redo`) back to PENDING.

    Which jobs are in work is kept in the daemon's memory only, never in the ledger.
    """

    PENDING = 0
    DONE = 1
    FAILED = 2
    SKIPPED = 3
    GONE = 4  # deleted or replaced before it was read


RECORDED = (JobStatus.DONE, JobStatus.FAILED)  # of images that have a sidecar or a reason


class Version(NamedTuple):
    """One version of a file's content. A change of any field makes it another image.

    The device number is not a field: it may change with a reboot, and two disks may have the same one after each other.
    """

    inode: int
    size: int  # bytes
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Version:
        figures = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        # SQLite's integers have 64 bits and a sign. Inodes may use all 64, and times after 2262 need more.
        if max(figures) >= 2**63 or min(figures) < -(2**63):
            return cls(*((figure + 2**63) % 2**64 - 2**63 for figure in figures))
        return cls(*figures)

    def is_of(self, status: os.stat_result, *, moved: bool) -> bool:
        """Whether a file is this version. moved: the daemon has moved it, so its change time is ignored: the move set it, or
        somebody who fixed its permissions. In the inbox the change time counts, because programs can set all other times."""
        now = Version.of(status)
        return stat.S_ISREG(status.st_mode) and self == (
            now._replace(ctime_ns=self.ctime_ns) if moved else now
        )


class File(NamedTuple):
    """A file as found in an inbox. `inbox` is the inbox's number in the ledger, `path` is relative to it.
    container: it is to be unpacked. before: paths in the inbox at which it was seen and is no more, the last one first."""

    inbox: int
    path: bytes
    version: Version
    regular: bool = True  # if not: a link, FIFO, socket or device, which is never opened
    container: bool = False
    before: tuple[bytes, ...] = ()


class Admitted(NamedTuple):
    """What became of files that were admitted. Versions that the ledger already had are not counted."""

    pending: int
    skipped: int
    replaced: int  # older versions that were still pending, now GONE
    failures_replaced: int = 0  # FAILED versions that were replaced
    results_kept: int = 0  # older versions that waited for a redo; they keep their results and are DONE
    returned: int = 0  # of those that are pending or skipped: versions that were GONE and are there again
    renamed: int = 0  # images that wait, whose files have other names now
    left: int = 0  # rows that these left behind, which say that a name is GONE


class Waiting(NamedTuple):
    """The images of an inbox that are not finished, and when the first of them was seen, in Unix seconds."""

    images: int
    oldest: float | None


class Change(NamedTuple):
    """What an image was, and what it is now."""

    before: JobStatus
    after: JobStatus


class Extent(NamedTuple):
    """A range of the slab, in bytes."""

    offset: int
    length: int


OF_BYTES = frozenset(  # reasons that a file may have because it is not complete yet
    (
        *(Reason.EMPTY, Reason.NOT_AN_IMAGE, Reason.FORMAT, Reason.HEADER, Reason.PIXELS, Reason.ASPECT),
        *(Reason.TRUNCATED, Reason.DECODER),
    )
)


class Failure(msgspec.Struct, frozen=True):
    """Why a job has no result. transient: it may succeed next time. away: the file's disk or mount is not available.
    written: somebody has the file open for writing. sought: it is not there, but the first scan may find it under another name:
    the seconds until it is looked for again. In these cases this attempt does not count."""

    reason: Reason
    detail: str
    transient: bool = False
    away: bool = False
    written: bool = False
    sought: float = 0.0

    @property
    def is_logged(self) -> bool:
        """Not for each image, if it is reported once for its whole inbox, or is no failure."""
        return not (self.away or self.sought) and self.reason is not Reason.UNPACKED


class Job(msgspec.Struct, array_like=True, frozen=True):
    """One version of one file that is to be processed, as its row in the ledger says."""

    id: int
    inbox: int
    path: bytes  # relative to the inbox
    location: bytes  # absolute: where the file is now (a failed file may have been moved)
    version: Version
    attempts: int
    seen_at: float  # Unix seconds
    deaths: int = 0  # workers that died while they ran only this image
    has_result: bool = False  # kept until there is a new one
    priority: int = 0  # in the ledger


class Content(msgspec.Struct, array_like=True, frozen=True):
    """What is known about the bytes of a file. outputs: by stage name."""

    digest: bytes = b""
    format: str = ""
    width: int = 0  # pixels, upright
    height: int = 0
    pages: int = 1  # pictures in the file; only one is read: see stages/images/pages.py
    outputs: dict[str, Output] = {}

    @property
    def payloads(self) -> dict[str, bytes]:
        """What the stages have found, by stage name, as JSON."""
        return {stage: output.payload for stage, output in self.outputs.items()}

    def with_outputs(self, outputs: dict[str, Output]) -> Content:
        return Content(self.digest, self.format, self.width, self.height, self.pages, outputs)

    def says_the_same(self, other: Content) -> bool:
        """Whether the results of the same stages are equal, but for the time that they took."""
        return all(self.outputs[stage].payload == each.payload for stage, each in other.outputs.items())


UNREAD = Content()


class Read(msgspec.Struct, array_like=True, frozen=True):
    """What came of reading a file: its digest, why it could not be read, or that it is not there in this version."""

    digest: bytes = b""
    failure: Failure | None = None
    gone: bool = False


GONE = Read(gone=True)


class Attempt(msgspec.Struct):
    """A job in the hands of an executor: what is known so far. Nobody else changes it."""

    job: Job
    content: Content = UNREAD
    failure: Failure | None = None
    gone: bool = False
    began_at: float = 0.0  # monotonic seconds, in all processes
    sent_at: float = 0.0  # to a worker, the last time; monotonic
    extent: Extent | None = None  # where its bytes are in the slab
    waits: int = 0  # for memory of its GPU, while other images fitted into it
    had_room: bool = False  # it was tried after nobody else used its GPU's memory


class Checksums(msgspec.Struct, array_like=True, frozen=True):
    """Checksums of the rows that an ending makes; see daemon/ledger/checksums.py. results: by stage. image: None if the image
    has neither a result nor a reason."""

    content: int
    results: dict[str, int]
    image: int | None


class Ending(msgspec.Struct, array_like=True, frozen=True):
    """How an attempt at a job ended. PENDING: it is retried, not before `not_before`. checksums: None: not computed yet."""

    job: Job
    status: JobStatus
    at: float  # Unix seconds
    attempts: int
    bin: str = ""
    criteria: bytes = b""  # JSON
    failure: Failure | None = None
    not_before: float = 0.0  # Unix seconds, by clock.py
    looks: tuple[str, ...] = ()  # the second looks that a DONE image gets
    checksums: Checksums | None = None
    content: Content = UNREAD
    began_at: float = 0.0  # monotonic seconds; 0: it never began
    # Its file had this result before: the row of that version has the new one in its place.
    is_repeat: bool = False
    # As `is_repeat`, under another name: how many rows, which say that a name is GONE, are there since. None: it was no rename.
    left: int | None = None

    @property
    def is_doubtful(self) -> bool:
        """Whether its file may only be away, or not be complete yet."""
        blamed = self.failure is not None and self.failure.reason in OF_BYTES
        return self.status is JobStatus.GONE or (blamed and self.status is not JobStatus.PENDING)

    @property
    def keeps_result(self) -> bool:
        """Whether the image is DONE with its previous result, because its file is gone or is a repeat."""
        return self.status is JobStatus.GONE and (self.job.has_result or self.is_repeat)


def list_published(endings: Iterable[Ending], newest: Collection[int]) -> list[Ending]:
    """Those that get files. newest: the ids of those that no newer version of their file has replaced."""
    return [each for each in endings if each.status in RECORDED and each.job.id in newest]


class Placed(msgspec.Struct, array_like=True, frozen=True):
    """Where a finished image's file is after publishing; None: where it was. is_held: it, or what its bin should have, is not
    where it belongs yet."""

    id: int
    location: bytes | None = None
    version: Version | None = None
    is_held: bool = False


def reason_of(failure: Failure | None) -> tuple[str | None, str | None]:
    if failure is None:
        return None, None
    # The detail may contain a file name that is not UTF-8, which SQLite and JSON refuse.
    return failure.reason, failure.detail.encode(errors="backslashreplace").decode()


class Outdated(msgspec.Struct, frozen=True):
    """How many files are DONE by a model that is not current any more.
    at_least: not all were counted; then 0 files may be some."""

    files: int
    at_least: bool = False

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return self.files > 0 or self.at_least
