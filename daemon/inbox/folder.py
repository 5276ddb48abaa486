"""An inbox as the watcher sees it: what is known about it, and calls that read it in threads of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import anyio
import structlog
from anyio import to_thread

from daemon.config.ignored import Ignored, ignored_by
from daemon.config.sections import Inbox
from daemon.core.jobs import File, Version
from daemon.inbox.origin import Origin, origin_of
from daemon.inbox.settle import TOUCHED_SECONDS, Patience, Settling
from daemon.inbox.walk import LONGEST_PATH, Unread
from daemon.ledger.joining import Name, find_other_names
from daemon.ledger.records import Reader
from daemon.ledger.statements import run_rows
from daemon.system.mounts import FolderIdentity, KnownFolder
from daemon.system.scarcity import cause_of

log = structlog.get_logger()
T = TypeVar("T")

THREADS = 2  # per inbox, so that a dead mount does not use up the threads of all inboxes
HINTS = 65_536  # events that wait; more are dropped, and a scan finds their files
POLL_SECONDS = 5.0  # between scans where there are no events
REST = 10  # a scan that took t seconds is followed by at least REST × t of rest
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

    def poll(self) -> None:
        """It is scanned more often from now on, as its events are not told."""
        self.polls = True

    def give_up(self) -> None:
        """Wait for it no longer."""
        self.given_up = self.problem()

    # Scans

    def resume(self, kept: bytes, *, once: bool) -> None:
        """Begin where a listing was interrupted, or with `once` at the beginning. kept: the marker in the ledger."""
        self.kept_marker = kept
        self.marker = b"" if once else kept

    def take_due(self, rescan_seconds: float) -> list[bytes]:
        """The sub-folders that are to be scanned now, b"" for all of it; they are not wanted any more."""
        self.wake = anyio.Event()  # before the check, so that no request in between is missed
        if not self.wanted and time.monotonic() < self.next_scan(rescan_seconds):
            return []
        due, self.wanted = sorted(self.wanted or {b""}), set()
        return due

    async def wait_for_due(self, rescan_seconds: float) -> None:
        """Until something is wanted, or a scan of all of it is due."""
        with anyio.move_on_after(max(self.next_scan(rescan_seconds) - time.monotonic(), 0.05)):
            await self.wake.wait()

    def note_away(self, error: OSError) -> None:
        """It cannot be scanned now."""
        self.note_answer(error)
        self.scanned_at = time.monotonic()

    def note_mounts(self, places: Collection[bytes]) -> None:
        """These are places of mounts below it now."""
        self.mounts.update(places)

    def begin_scan(self) -> None:
        """A scan of the whole inbox begins."""
        self.unread.begin_scan()
        self.settling.overflowed = False  # this scan finds again what did not fit

    def begin_chunk(self) -> tuple[float, float]:
        """The next files of a scan are read. Returns the time, in monotonic and in Unix seconds."""
        self.handled = set()
        return time.monotonic(), time.time()

    def end_chunks(self) -> None:
        self.handled = None

    def note_reached(self, path: bytes) -> None:
        """A scan, whose listing is ordered, has come to this path."""
        self.marker = path

    def note_kept(self) -> None:
        """The ledger has the marker now."""
        self.kept_marker, self.marker_kept_at = self.marker, time.monotonic()

    def note_end(self, began_at: bytes) -> None:
        """Decide where the next scan begins. began_at: where this one did."""
        if self.trouble and self.marker != began_at:
            return  # it goes on where this one was stopped
        # What cannot be listed may be in one place, and new files before it must not wait.
        self.marker = b""
        if began_at:
            self.wanted.add(b"")

    def note_scan(self, started: float) -> None:
        """A scan of the whole inbox has ended. started: monotonic."""
        self.unread.end_scan()
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

    def read_versions(self, paths: Collection[bytes]) -> list[File]:
        """The current version of each file that is there. Runs in a thread."""
        found = []
        for path in paths:
            with contextlib.suppress(OSError):  # it is gone
                status = os.stat(os.path.join(self.root, path), follow_symlinks=False)
                if len(path) <= self.longest and not stat.S_ISDIR(status.st_mode):
                    is_regular = stat.S_ISREG(status.st_mode)
                    found.append(File(self.number, path, Version.of(status), is_regular))
        return found

    def whole(
        self,
        files: Mapping[File, bool],
        times: tuple[float, float],
        renamed: Collection[bytes] = (),
    ) -> list[File]:
        """Those of these files that are whole, each given with whether only its change time is new. times: monotonic and Unix
        seconds from before their status was read. renamed: the paths of those that arrived by a rename."""
        patience, is_whole = self.patience, partial(self.settling.is_whole, read_by=time.monotonic())
        return [
            file
            for file, touched in files.items()
            if is_whole(file, patience, *times, renamed=file.path in renamed, touched=touched)
        ]

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


def open_folder(number: int, inbox: Inbox, longest: int = LONGEST_PATH) -> Folder:
    root, ignored, polls = inbox.root, ignored_by(inbox.ignore), inbox.watch == "poll"
    return Folder(number, inbox, root, origin_of(root), ignored, polls=polls, longest=longest)
