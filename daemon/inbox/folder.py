"""An inbox as the watcher sees it: what is known about it, and calls that read it in threads of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import anyio
import structlog
from anyio import to_thread
from msgspec.structs import replace

from daemon.config.ignored import Ignored, ignored_by
from daemon.config.sections import Inbox
from daemon.core.errors import LedgerUnusable
from daemon.core.jobs import Ending, Failure, File, Job, JobStatus, Version
from daemon.inbox.disk import why_not_deleted
from daemon.inbox.origin import Origin, origin_of
from daemon.inbox.settle import TOUCHED_SECONDS, Patience, Settling
from daemon.inbox.sources import SOUGHT, WRITTEN, is_still_written
from daemon.inbox.walk import LONGEST_PATH, Unread
from daemon.ledger.joining import Name, find_other_names
from daemon.ledger.records import Expected, Reader
from daemon.ledger.statements import run_rows
from daemon.system.mounts import FolderAway, FolderIdentity, KnownFolder, is_within, list_mounts
from daemon.system.scarcity import cause_of
from stages.contract.base import Reason

log = structlog.get_logger()
T = TypeVar("T")

THREADS = 2  # per inbox, so that a dead mount does not use up the threads of all inboxes
HINTS = 65_536  # events that wait; more are dropped, and a scan finds their files
POLL_SECONDS = 5.0  # between scans where there are no events
REST = 10  # a scan that took t seconds is followed by at least REST × t of rest
SEEK_SECONDS = 60.0  # after the first scan, in which what it has found may settle
LONGEST_SEEK_SECONDS = 600.0  # between two looks for a missing file
UNSETTLED = 20_000  # files that wait until they are whole; more are left to a scan that follows soon


class Hint(NamedTuple):
    """This file has changed."""

    path: bytes
    renamed: bool = False


@dataclass(slots=True)
class Folder:
    """An inbox as the watcher sees it. `number` is its number in the ledger. Each has its
    own tasks and threads, so that a mount that does not answer delays no other inbox."""

    number: int
    settings: Inbox
    root: bytes
    origin: Origin
    ignored: Ignored
    polls: bool = False
    has_answered: bool = False  # at least once
    longest: int = LONGEST_PATH  # bytes of a file's path in it
    unread: Unread = field(init=False)  # folders in it that cannot be read
    known: KnownFolder = field(init=False)
    mounts: set[bytes] = field(default_factory=set)  # places of mounts below it, that there were at any scan
    opened_at: float = field(default_factory=time.time)  # Unix seconds
    trouble: str = ""  # why it cannot be read
    given_up: str = ""  # why the watcher no longer waits for it
    scanned_at: float = 0.0  # monotonic
    first_scanned_at: float = 0.0  # monotonic; when the first scan ended
    scan_seconds: float = 0.0
    marker: bytes = b""  # how far a scan came that did not reach the end; the next one goes on from there
    kept_marker: bytes = b""  # the one in the ledger
    marker_kept_at: float = field(default_factory=time.monotonic)  # monotonic
    wanted: set[bytes] = field(default_factory=set)  # sub-folders to scan now
    wake: anyio.Event = field(default_factory=anyio.Event)  # set when something is wanted
    hints: asyncio.Queue[Hint] = field(default_factory=lambda: asyncio.Queue(HINTS))
    noticed: set[bytes] = field(default_factory=set)  # paths of events whose files are not admitted yet
    handled: set[bytes] | None = (
        None  # those admitted since a scan has read their folder; None without a scan
    )
    settling: Settling = field(default_factory=lambda: Settling(UNSETTLED))
    threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(THREADS))
    # When each call that still runs in a thread began (monotonic).
    calls: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unread, self.known = Unread(self.root), KnownFolder(self.root)

    @property
    def label(self) -> str:
        """Its name in the metrics."""
        return self.settings.name or self.root.decode(errors="replace")

    @property
    def patience(self) -> Patience:
        seconds = self.settings.settle_seconds if self.origin.settles else 0.0
        return Patience(seconds, trusts_clock=not self.polls)

    async def in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function that reads the folder, in a thread: it may never return."""
        started = time.monotonic()
        self.calls.append(started)
        try:
            answer = await to_thread.run_sync(
                function, *arguments, abandon_on_cancel=True, limiter=self.threads
            )
            self.has_answered = True
            return answer
        finally:
            self.calls.remove(started)

    async def learn_events(self) -> bool:
        """Find out whether its file system sends events; otherwise it is scanned more often. Returns whether it answers."""
        try:
            is_told = await self.in_thread(self.origin.sends_events)
        except OSError as error:
            self.note_answer(error)
            return False
        self.polls |= not is_told and self.settings.watch == "auto"
        return True

    def note_scan(self, started: float) -> None:
        """A scan of the whole inbox has ended. started: monotonic."""
        self.scanned_at = time.monotonic()
        self.scan_seconds = self.scanned_at - started
        self.first_scanned_at = self.first_scanned_at or self.scanned_at

    def wake_to_settle(self) -> None:
        """If something has to settle, wake who follows its events."""
        if len(self.settling) and self.hints.empty():
            self.push(Hint(b""))

    def note_answer(self, error: OSError | None) -> None:
        """Note whether it can be read; log once that it cannot, and that it can again."""
        path = os.fsdecode(self.root)
        if error and not self.trouble:
            log.warning(
                "inbox cannot be read; it is tried again at every scan", path=path, error=cause_of(error)
            )
        elif self.trouble and not error:
            log.info("inbox can be read again", path=path)
        self.trouble = cause_of(error) if error else ""

    def find_absence(self, reader: Reader) -> OSError | None:
        """Why it is not the folder with the files that the ledger knows; None if it is. Another folder is accepted if it
        has at least one of these, as a mount may come back under another number; or on the same disk if no file waits.
        Runs in a thread."""
        if self.origin.is_remote:
            return None
        try:
            self.known.check()
            self.mounts |= _mounts_below(self.root).keys()
        except FolderAway as away:
            try:
                files = reader.files_of(self.number)
            except LedgerUnusable:  # it is asked again at the next scan
                return away
            if not any(map(self._has, files)) and (
                any(file.waits for file in files) or not self._is_on_same_disk()
            ):
                return away
            self.known.accept()
        except OSError:  # the walk reports it
            return None
        return None

    def _has(self, file: Expected) -> bool:
        try:
            status = os.lstat(os.path.join(self.root, file.path))
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)

    def _is_on_same_disk(self) -> bool:
        with contextlib.suppress(OSError):
            return self.known.found is not None and os.stat(self.root).st_dev == self.known.found[1].device
        return False

    def find_unknown(
        self, files: list[File], reader: Reader
    ) -> tuple[dict[File, bool], dict[File, list[Name]]]:
        """Those whose version the ledger does not know, each with whether only its change time is new; and for `note_renamed`,
        the other names of some. Runs in a thread. Raises LedgerUnusable."""
        with reader.lend() as connection:
            known = set(
                map(tuple, run_rows(connection, "versions", [(file.path,) for file in files], self.number))
            )
            unknown = [file for file in files if (file.path, *file.version) not in known]
            same = {row[:-1] for row in known} if unknown else set()  # without the change time
            found = {file: (file.path, *file.version[:-1]) in same for file in unknown}
            return found, {} if self.origin.is_remote else find_other_names(connection, unknown)

    def note_renamed(self, files: dict[File, bool], names: Mapping[File, Sequence[Name]]) -> dict[File, bool]:
        """The same files; those that have left other names have these as `before`. names: of some of them. Runs in a thread."""
        return {f._replace(before=self._left_by(f, names[f]) if f in names else ()): files[f] for f in files}

    def _left_by(self, file: File, names: Sequence[Name]) -> tuple[bytes, ...]:
        born = 0
        with contextlib.suppress(OSError):
            born = FolderIdentity.of_file(os.path.join(self.root, file.path)).born
        # The inode of a deleted file is used again: what was made after a file was seen is another one.
        return tuple(name.path for name in names if born <= name.ctime_ns and self._has_left(name.path, file))

    def _has_left(self, name: bytes, file: File) -> bool:
        """Whether a file with the name `file.path` does not have another one too, as with hard links."""
        if name == file.path or not file.regular:
            return False
        try:
            status = os.lstat(os.path.join(self.root, name))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        is_other = Version.of(status).inode != file.version.inode
        # Of file systems that find a name in other letters or accents too.
        return is_other or (status.st_nlink == 1 and _letters_of(name) == _letters_of(file.path))

    def find_hidden(
        self, endings: Sequence[Ending], reader: Reader, check_outputs: Callable[[], None]
    ) -> dict[int, Failure]:
        """See Watcher.find_hidden. Runs in a thread."""
        hidden = self._find_written(endings)
        gone = [ending.job for ending in endings if ending.status is JobStatus.GONE]
        if not gone:
            return hidden
        away, unmounted = self.find_absence(reader), self.mounts
        with contextlib.suppress(OSError):  # if that cannot be read, images below a mount wait
            unmounted = self.mounts - _mounts_below(self.root).keys()
        for job in gone:
            why = _trouble_of(check_outputs) if job.location else self._why_away(job, away, unmounted)
            if why:
                hidden[job.id] = Failure(Reason.UNREADABLE, why, transient=True, away=True)
            elif not job.location and (seconds := self._seeks()):
                hidden[job.id] = Failure(Reason.UNREADABLE, SOUGHT, transient=True, sought=seconds)
        return hidden

    def _find_written(self, endings: Sequence[Ending]) -> dict[int, Failure]:
        """By image, the failures of files that are still being written."""
        failures = [(e.job, e.failure) for e in endings if e.failure]
        return {job.id: found for job, why in failures if (found := self._find_writer(job, why))}

    def _why_away(self, job: Job, away: OSError | None, unmounted: set[bytes]) -> str:
        """As `_why_hidden`. away: why the whole inbox is."""
        return "" if self.origin.is_remote else str(away or self._why_hidden(job, unmounted))

    def _seeks(self) -> float:
        """While the first scan may still find a missing file under another name: seconds until the next look for it, which grow
        with those since the start, as there may be many; otherwise 0. What a scan has found may have to settle."""
        waits = len(self.settling) or self.settling.overflowed
        limit = self.first_scanned_at + max(SEEK_SECONDS, 2 * self.settings.settle_seconds)
        if self.origin.is_remote or (self.first_scanned_at and not (waits and time.monotonic() < limit)):
            return 0.0
        return min(max(1.0, time.time() - self.opened_at), LONGEST_SEEK_SECONDS)

    def _find_writer(self, job: Job, failure: Failure) -> Failure | None:
        """If the file of a job that has failed is still open for writing, and not for too long: the failure that says so."""
        path = job.location or os.path.join(self.root, job.path)
        if self.origin.is_remote or not is_still_written(path, job.seen_at):
            return None
        return replace(failure, detail=f"{WRITTEN}: {failure.detail}", written=True)

    def _why_hidden(self, job: Job, unmounted: set[bytes]) -> str:
        """Why a file that was not found has not been deleted; empty if it has, as far as that can be seen."""
        path = os.path.join(self.root, job.path)
        try:
            is_there = job.version.is_of(os.lstat(path), moved=False)
            return "it was away for a moment" if is_there else ""
        except OSError:
            pass
        if job.seen_at >= self.opened_at:  # the identity of its folder is known
            return self._why_unmounted(path, unmounted)
        return self.why_not_deleted(job.path, job.seen_at, unmounted)

    def why_not_deleted(self, path: bytes, seen_at: float, unmounted: set[bytes]) -> str:
        """Why a file that is missing has not been deleted; empty if it has, as far as its folders show. unmounted: as of
        `find_unmounted`."""
        gone = self._why_unmounted(os.path.join(self.root, path), unmounted)
        return gone or why_not_deleted(self.root, path, seen_at)

    def _why_unmounted(self, path: bytes, unmounted: set[bytes]) -> str:
        for mount in unmounted:
            if is_within(path, mount):
                fix = "Mount it again; if its images are not needed any more, restart the daemon"
                return f"{os.fsdecode(mount)} is not mounted any more. {fix}"
        return ""

    def find_unmounted(self) -> set[bytes]:
        """The places of mounts that it had and has no more, or that are mounted when they are used, and are not. Raises
        FolderAway if it is not the folder that it was; OSError."""
        self.known.check()
        there = _mounts_below(self.root)
        return (self.mounts - there.keys()) | {place for place, kind in there.items() if kind == b"autofs"}

    def silent_seconds(self) -> float:
        """How long it has not answered, if that is too long; else 0."""
        waited = time.monotonic() - min(self.calls, default=time.monotonic())
        return waited if waited > self.origin.answer_seconds[self.has_answered] else 0.0

    def configure(self, inbox: Inbox) -> None:
        """Use these settings from now on. If other names are ignored than before, scan it for them."""
        is_scan_wanted = inbox.ignore != self.settings.ignore
        self.settings, self.ignored = inbox, ignored_by(inbox.ignore)
        if is_scan_wanted:
            self.wanted.add(b"")
        self.wake.set()  # the next scan may be due earlier

    def next_scan(self, rescan_seconds: float) -> float:
        """When a scan of all of it is due (monotonic)."""
        if not self.scanned_at:
            return 0.0
        # A store charges for each request.
        is_quick = (self.polls or self.trouble) and not self.origin.is_remote
        interval = min(POLL_SECONDS, rescan_seconds) if is_quick else rescan_seconds
        if self.settling.overflowed:
            # By then there is room for the files that did not fit.
            interval = min(interval, max(self.settings.settle_seconds, TOUCHED_SECONDS))
        # A scan that failed may only have waited for an answer, and the rest of it should follow soon.
        rest = 0.0 if self.trouble else REST * self.scan_seconds
        return self.scanned_at + max(interval, rest)

    def want_scan(self, subtree: bytes = b"") -> None:
        self.wanted.add(subtree)
        self.wake.set()

    def push(self, hint: Hint) -> None:
        try:
            self.hints.put_nowait(hint)
            self.noticed.add(hint.path)
        except asyncio.QueueFull:
            self.want_scan()

    def was_noticed(self, path: bytes) -> bool:
        """Whether an event has named this file, which a scan has found too."""
        return path in self.noticed or path in (self.handled or ())

    def forget_events(self, paths: set[bytes]) -> None:
        """These files are admitted or gone."""
        self.noticed -= paths
        if self.handled is not None:
            self.handled |= paths

    def problem(self) -> str:
        """Why no files are found in it at present; else empty."""
        if self.given_up:
            return self.given_up
        if silent := self.silent_seconds():
            what = "store" if self.origin.is_remote else "mount"
            return f"inbox {self.settings.place} has not answered for {silent:.0f} s; is its {what} dead?"
        return f"inbox {self.settings.place} cannot be read: {self.trouble}" if self.trouble else ""


def _letters_of(name: bytes) -> str:
    return unicodedata.normalize("NFC", os.fsdecode(name)).casefold()


def _mounts_below(root: bytes) -> dict[bytes, bytes]:
    """The kind of the last mount at each place."""
    real = os.path.realpath(root)
    mounts = [mount for mount in list_mounts() if mount.place != real and is_within(mount.place, real)]
    return {mount.place: mount.kind for mount in mounts}


def _trouble_of(check: Callable[[], None]) -> str:
    try:
        check()
    except OSError as error:
        return str(error)
    return ""


def open_folder(number: int, inbox: Inbox) -> Folder:
    root = inbox.root
    polls = inbox.watch == "poll"
    return Folder(number, inbox, root, origin_of(root), ignored_by(inbox.ignore), polls=polls)
