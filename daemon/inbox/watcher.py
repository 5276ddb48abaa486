"""Finds files. Events are a hint; a scan of the folders, compared with the ledger, is the truth.

The kernel drops events if nobody reads them in time, network mounts send none, and a daemon that was down got
none. So each inbox is scanned every `rescan_seconds`, and files that the ledger does not know are admitted.
Events only make that faster.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import anyio
import structlog
from asyncinotify import Event, Inotify, Mask

from daemon.config.sections import Inbox
from daemon.core.jobs import Ending, Failure, File
from daemon.inbox.folder import Folder, Hint, open_folder
from daemon.inbox.unavailable import find_hidden, why_unavailable
from daemon.inbox.walk import LONGEST_PATH, Unread, Walk
from daemon.ledger.records import Reader
from daemon.monitoring.metrics import Metrics
from daemon.system.mounts import ANSWER_SECONDS
from daemon.system.retry import Retry

log = structlog.get_logger()
T = TypeVar("T")

CHUNK, CHUNK_SECONDS = 512, 1.0  # files for one query of the ledger; the longest time for collecting them
MARKER_SECONDS = 5.0  # between two commits of how far a listing came

_EVENTS = Mask.CREATE | Mask.CLOSE_WRITE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.ATTRIB | Mask.ONLYDIR


Admit = Callable[[list[File]], Awaitable[None]]
KeepMarker = Callable[[int, bytes], Awaitable[None]]


class Watcher:
    """Hands every whole new version of every file in the inboxes to `admit`, in lists."""

    def __init__(
        self,
        inboxes: dict[int, Inbox],
        reader: Reader,
        rescan_seconds: float,
        metrics: Metrics,
        *,
        longest: Mapping[int, int] | None = None,
        retry: Retry | None = None,
        keep_marker: KeepMarker | None = None,
    ) -> None:
        """retry: for reading the ledger. longest: by inbox, how many bytes the path of a file in it may have.
        keep_marker: stores how far the listing of an inbox came; None: that is not stored."""
        limits = longest or {}
        self.folders = {
            number: open_folder(number, inbox, limits.get(number, LONGEST_PATH))
            for number, inbox in inboxes.items()
        }
        self._folders = list(self.folders.values())
        self._reader = reader
        self._retry = retry or Retry()
        self._keep_marker = keep_marker
        self._rescan_seconds = rescan_seconds
        self._metrics = metrics
        self._watched: dict[int, tuple[Folder, bytes]] = {}  # watch descriptor → folder
        self._inotify: Inotify | None = None
        metrics.begin_inboxes(self.labels())
        for folder in self._folders:
            metrics.unread_folders.labels(folder.label).set_function(folder.unread.__len__)

    async def run(
        self, admit: Admit, answered: Callable[[], None] = lambda: None, *, once: bool = False
    ) -> None:
        """Watch until cancelled; with `once`, until all files that are there are whole and admitted.
        answered: called when an inbox has answered for the first time."""
        self._admit, self._answered = admit, answered
        for folder in self._folders:
            kept = await self._retry.in_thread("ledger", self._reader.marker, folder.number)
            folder.resume(kept, once=once)
        if once:
            async with anyio.create_task_group() as tasks:
                for folder in self._folders:
                    tasks.start_soon(self._sweep_or_give_up, folder)
            return
        self._inotify = self._start_inotify()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._listen)
                for folder in self._folders:
                    tasks.start_soon(self._follow, folder)
                    tasks.start_soon(self._rescan, folder)
        finally:
            if self._inotify:
                self._inotify.close()

    def configure(self, inboxes: Sequence[Inbox], rescan_seconds: float) -> None:
        """Use these settings of the inboxes from now on: what to ignore, and when files and scans are due.
        inboxes: the same folders in the same order."""
        self._rescan_seconds = rescan_seconds
        for folder, inbox in zip(self._folders, inboxes, strict=True):
            folder.configure(inbox)

    def held_back(self) -> list[str]:
        """Why files of some inboxes are not found; empty if all are."""
        return [problem for folder in self._folders if (problem := folder.problem())]

    def labels(self) -> dict[int, str]:
        """The name of each inbox in the metrics, by its number."""
        return {folder.number: folder.label for folder in self._folders}

    def away(self) -> set[int]:
        """The inboxes whose files are not found."""
        return {folder.number for folder in self._folders if folder.problem()}

    async def find_hidden(
        self, endings: Sequence[Ending], check_outputs: Callable[[], None]
    ) -> dict[int, Failure]:
        """Of images that are GONE or have failed, those whose files may come back, or are still being written, and why.
        check_outputs: raises OSError if the folders of moved files are away."""
        hidden: dict[int, Failure] = {}
        for folder in self._folders:
            if mine := [ending for ending in endings if ending.job.inbox == folder.number]:
                hidden |= await folder.in_thread(find_hidden, folder, mine, self._reader, check_outputs)
        return hidden

    def unread(self) -> list[Unread]:
        """The folders that cannot be read, for each inbox that has some."""
        return [folder.unread for folder in self._folders if len(folder.unread)]

    def answering(self) -> set[int]:
        """The inboxes that can be read without waiting for a dead mount."""
        return {
            folder.number
            for folder in self._folders
            if folder.has_answered and not (folder.silent_seconds() or folder.given_up)
        }

    # The truth: scans

    async def _sweep_or_give_up(self, folder: Folder) -> None:
        """Sweep, but stop waiting for an inbox that does not answer: `held_back` reports it."""
        async with anyio.create_task_group() as tasks:

            async def sweep() -> None:
                await self._sweep(folder)
                tasks.cancel_scope.cancel()

            tasks.start_soon(sweep)
            silences = 0
            while silences < 2:  # in a row; after one alone, the whole machine may have been suspended
                await anyio.sleep(ANSWER_SECONDS / 4)
                silences = silences + 1 if folder.silent_seconds() else 0
            folder.give_up()
            tasks.cancel_scope.cancel()

    async def _sweep(self, folder: Folder) -> None:
        """Scan everything, wait for files that have not settled, and scan again for what did not fit."""
        await self._scan(folder, b"")
        while (pause := folder.settling.seconds_to_next(time.monotonic())) is not None:
            await anyio.sleep(pause)
            await self._examine(folder, [])
            if folder.settling.has_room_again:
                await self._scan(folder, b"")

    async def _rescan(self, folder: Folder) -> None:
        while True:
            for subtree in folder.take_due(self._rescan_seconds):
                await self._scan(folder, subtree)
            await folder.wait_for_due(self._rescan_seconds)

    async def _scan(self, folder: Folder, subtree: bytes) -> None:
        """Walk a folder and admit the files that the ledger does not know, in chunks."""
        started = time.monotonic()
        if not folder.has_answered:
            if not await folder.learn_events():
                return
            self._answered()
        if away := await folder.in_thread(why_unavailable, folder, self._reader):
            folder.note_away(away)
            return
        if not subtree:
            folder.begin_scan()
        is_first = not folder.scanned_at
        began_at, chunks = folder.marker, self._walk(folder, subtree)
        times = folder.begin_chunk()
        while (found := await folder.in_thread(next, chunks, None)) is not None:
            await self._admit_chunk(folder, found, times, has_events=not (is_first or subtree))
            times = folder.begin_chunk()
        folder.end_chunks()
        if not subtree:
            folder.note_end(began_at)
            await self._store_marker(folder)
            folder.note_scan(started)
            self._metrics.scanned(folder.label, folder.scan_seconds)

    async def _admit_chunk(
        self, folder: Folder, found: list[File], times: tuple[float, float], *, has_events: bool
    ) -> None:
        """Admit what is whole and new of a chunk of a scan. times: as of `Folder.whole`. has_events: whether events should have
        told of new files, if the inbox has any."""
        whole = folder.whole(await self._find_unknown(folder, found), times)
        if has_events and not folder.polls:  # since this very scan, if its watches were too many
            self._count_missed(folder, whole)
        if whole:
            await self._admit(whole)
            folder.forget_events({file.path for file in whole})
        if found and folder.origin.is_ordered:
            folder.note_reached(found[-1].path)
            if time.monotonic() > folder.marker_kept_at + MARKER_SECONDS:
                await self._store_marker(folder)
        folder.wake_to_settle()

    def _count_missed(self, folder: Folder, found: Collection[File]) -> None:
        """Files that a scan has found although events should have told of them."""
        missed = sum(not folder.was_noticed(file.path) for file in found)
        self._metrics.reconcile_found.inc(missed)
        self._metrics.inbox_missed.labels(folder.label).inc(missed)

    async def _store_marker(self, folder: Folder) -> None:
        """Store where the listing goes on after a restart: listing ten million objects takes a quarter of an hour. The
        marker is only a hint: without it a scan begins again, and a scan from a marker is followed by a complete one."""
        if self._keep_marker and folder.marker != folder.kept_marker:
            await self._keep_marker(folder.number, folder.marker)
            folder.note_kept()

    def _walk(self, folder: Folder, subtree: bytes) -> Iterator[list[File]]:
        """All files, in chunks. No chunk takes long; otherwise many folders without files would look
        like a dead mount. Runs in a thread."""
        found: list[File] = []
        yielded_at = time.monotonic()
        own = (partial(self._watch, folder), folder.note_answer)
        recursive, after = folder.settings.recursive, folder.marker
        walk = Walk(folder.root, folder.ignored, recursive, folder.unread, folder.longest, *own, after)
        for entry in folder.origin.files(walk, subtree):
            if entry:
                found.append(File(folder.number, *entry))
            if len(found) >= CHUNK or time.monotonic() > yielded_at + CHUNK_SECONDS:
                yield found
                found, yielded_at = [], time.monotonic()
        yield found

    async def _find_unknown(self, folder: Folder, files: list[File]) -> dict[File, bool]:
        """Those whose version the ledger does not know, each with whether only its change time is new."""
        found, names = await self._retry.in_thread("ledger", folder.find_unknown, files, self._reader)
        return await folder.in_thread(folder.note_renamed, found, names) if names else found

    # The hints: events

    def _start_inotify(self) -> Inotify | None:
        if all(folder.settings.watch == "poll" for folder in self._folders):
            return None
        try:
            return Inotify(cache_size=256)
        except OSError as error:
            self._fall_back(error)
            return None

    def _watch(self, folder: Folder, relative: bytes) -> None:
        """Ask for the events of one folder. This comes before the folder is listed,
        so that no file is missed."""
        if folder.polls or self._inotify is None:
            return
        try:
            watch = self._inotify.add_watch(os.path.join(folder.root, relative), _EVENTS)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EMFILE):
                self._fall_back(error)
            return
        self._watched[watch.wd] = (folder, relative)

    def _fall_back(self, error: OSError) -> None:
        log.warning(
            "inotify's limits are used up; folders are polled instead. Raise fs.inotify.max_user_watches and "
            "fs.inotify.max_user_instances with sysctl.",
            error=error.strerror,
        )
        for folder in self._folders:
            folder.poll()

    async def _listen(self) -> None:
        """Turn events into hints."""
        if self._inotify is None:
            return
        async for event in self._inotify:
            if event.mask & Mask.Q_OVERFLOW:
                self._metrics.watch_overflows.inc()
                for folder in self._folders:
                    folder.want_scan()
            elif event.watch and event.watch.wd in self._watched:
                self._take_event(event, *self._watched[event.watch.wd])

    def _take_event(self, event: Event, folder: Folder, relative: bytes) -> None:
        if event.mask & Mask.IGNORED and event.watch:
            self._watched.pop(event.watch.wd, None)
            return
        name = os.fsencode(event.name) if event.name else b""
        path, is_folder = os.path.join(relative, name), bool(event.mask & Mask.ISDIR)
        if not name or folder.ignored.hides(path, is_folder=is_folder):
            return
        if not is_folder:
            folder.push(Hint(path, renamed=bool(event.mask & Mask.MOVED_TO)))
        elif folder.settings.recursive and (
            event.mask & (Mask.CREATE | Mask.MOVED_TO) or path in folder.unread.causes
        ):
            folder.want_scan(path)  # it may already have files, or its permissions have changed

    async def _follow(self, folder: Folder) -> None:
        """Examine the files that hints name, and again those that had not settled."""
        while True:
            hints: list[Hint] = []
            with anyio.move_on_after(folder.settling.seconds_to_next(time.monotonic())):
                hints.append(await folder.hints.get())
            while not folder.hints.empty() and len(hints) < CHUNK:
                hints.append(folder.hints.get_nowait())
            await self._examine(folder, hints)

    async def _examine(self, folder: Folder, hints: list[Hint]) -> None:
        """Read the status of each file that a hint names or that has settled, and admit those that are whole and new."""
        times = time.monotonic(), time.time()
        renamed = {hint.path for hint in hints if hint.renamed}
        paths = {hint.path for hint in hints}.union(folder.settling.due(times[0]))
        if not paths:
            return
        found = await folder.in_thread(folder.read_versions, paths)
        files = await self._find_unknown(folder, found)
        for path in paths - {file.path for file in files}:
            folder.settling.forget(path)
        if whole := folder.whole(files, times, renamed):
            await self._admit(whole)
        folder.forget_events({path for path in paths if path not in folder.settling})
        if folder.settling.overflowed:
            folder.wake.set()  # the next scan is due sooner
