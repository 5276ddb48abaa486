"""Which inboxes, and which files that were not found, are only away: on a file system that is not mounted, still being written,
or under a name that the first scan has not come to."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from daemon.core.errors import LedgerUnusable
from daemon.core.jobs import Ending, Failure, Job, JobStatus
from daemon.inbox.disk import why_not_deleted
from daemon.inbox.folder import Folder
from daemon.inbox.sources import SOUGHT, WRITTEN, is_still_written
from daemon.ledger.records import Expected, Reader
from daemon.system.mounts import FolderAway, is_within, list_mounts
from stages.contract.base import Reason

SEEK_SECONDS = 60.0  # after the first scan, in which what it has found may settle
LONGEST_SEEK_SECONDS = 600.0  # between two looks for a missing file


def why_unavailable(folder: Folder, reader: Reader) -> OSError | None:
    """Why an inbox is not the folder with the files that the ledger knows; None if it is. Another folder is accepted if it
    has at least one of these, as a mount may come back under another number; or on the same disk if no file waits.
    Runs in a thread."""
    if folder.origin.is_remote:
        return None
    try:
        folder.known.check()
        folder.note_mounts(_mounts_below(folder.root))
    except FolderAway as away:
        try:
            files = reader.files_of(folder.number)
        except LedgerUnusable:  # it is asked again at the next scan
            return away
        if not any(_has(folder, file) for file in files) and (
            any(file.waits for file in files) or not _is_on_same_disk(folder)
        ):
            return away
        folder.known.accept()
    except OSError:  # the walk reports it
        return None
    return None


def _has(folder: Folder, file: Expected) -> bool:
    try:
        status = os.lstat(os.path.join(folder.root, file.path))
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)


def _is_on_same_disk(folder: Folder) -> bool:
    with contextlib.suppress(OSError):
        return folder.known.found is not None and os.stat(folder.root).st_dev == folder.known.found[1].device
    return False


def find_hidden(
    folder: Folder, endings: Sequence[Ending], reader: Reader, check_outputs: Callable[[], None]
) -> dict[int, Failure]:
    """See Watcher.find_hidden. Runs in a thread."""
    hidden = _find_written(folder, endings)
    gone = [ending.job for ending in endings if ending.status is JobStatus.GONE]
    if not gone:
        return hidden
    away, unmounted = why_unavailable(folder, reader), folder.mounts
    with contextlib.suppress(OSError):  # if that cannot be read, images below a mount wait
        unmounted = folder.mounts - _mounts_below(folder.root).keys()
    for job in gone:
        why = _trouble_of(check_outputs) if job.location else _why_away(folder, job, away, unmounted)
        if why:
            hidden[job.id] = Failure(Reason.UNREADABLE, why, transient=True, away=True)
        elif not job.location and (seconds := _seeks(folder)):
            hidden[job.id] = Failure(Reason.UNREADABLE, SOUGHT, transient=True, sought=seconds)
    return hidden


def _find_written(folder: Folder, endings: Sequence[Ending]) -> dict[int, Failure]:
    """By image, the failures of files that are still being written."""
    failures = [(e.job, e.failure) for e in endings if e.failure]
    return {job.id: found for job, why in failures if (found := _find_writer(folder, job, why))}


def _why_away(folder: Folder, job: Job, away: OSError | None, unmounted: set[bytes]) -> str:
    """As `_why_hidden`. away: why the whole inbox is."""
    return "" if folder.origin.is_remote else str(away or _why_hidden(folder, job, unmounted))


def _seeks(folder: Folder) -> float:
    """While the first scan may still find a missing file under another name: seconds until the next look for it, which grow
    with those since the start, as there may be many; otherwise 0. What a scan has found may have to settle."""
    waits = len(folder.settling) or folder.settling.overflowed
    limit = folder.first_scanned_at + max(SEEK_SECONDS, 2 * folder.settings.settle_seconds)
    if folder.origin.is_remote or (folder.first_scanned_at and not (waits and time.monotonic() < limit)):
        return 0.0
    return min(max(1.0, time.time() - folder.opened_at), LONGEST_SEEK_SECONDS)


def _find_writer(folder: Folder, job: Job, failure: Failure) -> Failure | None:
    """If the file of a job that has failed is still open for writing, and not for too long: the failure that says so."""
    path = job.location or os.path.join(folder.root, job.path)
    if folder.origin.is_remote or not is_still_written(path, job.seen_at):
        return None
    return replace(failure, detail=f"{WRITTEN}: {failure.detail}", written=True)


def _why_hidden(folder: Folder, job: Job, unmounted: set[bytes]) -> str:
    """Why a file that was not found has not been deleted; empty if it has, as far as that can be seen."""
    path = os.path.join(folder.root, job.path)
    try:
        is_there = job.version.is_of(os.lstat(path), moved=False)
        return "it was away for a moment" if is_there else ""
    except OSError:
        pass
    if job.seen_at >= folder.opened_at:  # the identity of its folder is known
        return _why_unmounted(folder, path, unmounted)
    return why_missing(folder, job.path, job.seen_at, unmounted)


def why_missing(folder: Folder, path: bytes, seen_at: float, unmounted: set[bytes]) -> str:
    """Why a file that is missing has not been deleted; empty if it has, as far as its folders show. unmounted: as of
    `find_unmounted`."""
    gone = _why_unmounted(folder, os.path.join(folder.root, path), unmounted)
    return gone or why_not_deleted(folder.root, path, seen_at)


def _why_unmounted(folder: Folder, path: bytes, unmounted: set[bytes]) -> str:
    for mount in unmounted:
        if is_within(path, mount):
            fix = "Mount it again; if its images are not needed any more, restart the daemon"
            return f"{os.fsdecode(mount)} is not mounted any more. {fix}"
    return ""


def find_unmounted(folder: Folder) -> set[bytes]:
    """The places of mounts that it had and has no more, or that are mounted when they are used, and are not. Raises
    FolderAway if it is not the folder that it was; OSError."""
    folder.known.check()
    there = _mounts_below(folder.root)
    return (folder.mounts - there.keys()) | {place for place, kind in there.items() if kind == b"autofs"}


def _trouble_of(check: Callable[[], None]) -> str:
    try:
        check()
    except OSError as error:
        return str(error)
    return ""


def _mounts_below(root: bytes) -> dict[bytes, bytes]:
    """The kind of the last mount at each place."""
    real = os.path.realpath(root)
    mounts = [mount for mount in list_mounts() if mount.place != real and is_within(mount.place, real)]
    return {mount.place: mount.kind for mount in mounts}
