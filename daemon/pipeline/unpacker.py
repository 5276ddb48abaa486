"""Unpacks archives, documents and videos, each into a folder beside it in its inbox.

Such a file waits in the ledger like an image, in a line of its own (ledger/waiting.py). inbox/a.zip is unpacked
into the folder inbox/a.zip.unpacked, and each file there is an image like any other: with its own row, result and
bin, and moved or deleted as the inbox's on_success says. The archive itself is SKIPPED for the reason `unpacked`, or
FAILED for the reason `container`; then what could be read is there all the same.

A crash at any moment loses nothing and repeats nothing: the row is PENDING until the files have rows of their own, and
a folder that is complete says of which version it is (folder.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import anyio
import structlog
from anyio import to_thread

from daemon.config.ignored import ignored_by
from daemon.config.loading import Config
from daemon.config.sections import Inbox
from daemon.core.errors import MissingLibrary
from daemon.core.jobs import Attempt, Committed, Ending, Failure, File, Job, JobStatus, Version
from daemon.inbox.sources import WRITTEN, is_still_written, numbered_name
from daemon.inbox.walk import Unread, Walk
from daemon.ledger.record import Record
from daemon.pipeline.station import Published
from daemon.results.destinations import Destination, Held, publish_records
from daemon.results.judge import Judge
from daemon.system.beneath import READ, open_beneath
from daemon.system.retry import Retry
from daemon.system.scarcity import AWAY, PASSING, SCARCE, cause_of
from daemon.unpacking.apart import Children, Interrupted, UnpackingStopped, UnpackOutcome, take_apart
from daemon.unpacking.folder import Contents, Mark, Most, NoRoom, choose_target, mark_of
from daemon.unpacking.kinds import FOLDER, TIFF, find_missing, has_further_pages, kind_of
from daemon.unpacking.members import Rules
from daemon.unpacking.paths import exists, made_inner
from stages.contract.base import Reason
from stages.contract.processes import count_cores

log = structlog.get_logger()

AT_ONCE, MOST_AT_ONCE = 2, 8  # files that are unpacked at the same time: at least, and at most
CORES = 4  # for each of them
PAUSE_SECONDS = 1.0  # between two questions
PAUSE_SHARE, LONGEST_PAUSE_SECONDS = 20, 5.0  # at least so many times as long as the answer took; at most
CHUNK = 512  # files that get their rows together
VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.ESTALE)


class Gone(Exception):
    """The file is not there, or has changed since it was found."""


class Unpacked(NamedTuple):
    """folder: its path in the inbox."""

    folder: bytes
    outcome: UnpackOutcome


class UnpackerHome(Protocol):
    """What an unpacker needs of the pipeline."""

    retry: Retry

    async def next_container(self, unpacker: object) -> Job | None: ...
    async def pause(self, seconds: float) -> None: ...
    async def take_as_image(self, job: Job) -> None: ...
    def let_go(self, images: Sequence[int]) -> None: ...
    def record_of(self, ending: Ending) -> Record: ...
    async def admit(self, files: list[File]) -> None: ...
    async def end(self, endings: Sequence[Ending]) -> Committed: ...
    async def note_published(self, group: Published) -> None: ...


class Unpacker:
    """Works beside the stations, on a few files at a time."""

    def __init__(
        self,
        config: Config,
        inboxes: Mapping[int, Inbox],
        destinations: Mapping[int, Destination],
        judge: Judge,
        *,
        once: bool = False,
    ) -> None:
        """inboxes: by number. once: the daemon ends when all is done, and so nothing waits until a disk has room."""
        self._once = once
        self._inboxes = {number: inbox for number, inbox in inboxes.items() if inbox.unpack}
        self._destinations = destinations
        self._judge = judge
        self._limits = config.pipeline.limits()
        self._settings = config.unpacking
        self._children = Children()
        self._asking = anyio.Lock()
        self._waits: set[int] = set()  # files of which the log says that they wait

    @property
    def progressed_at(self) -> float:
        """When a part of a file was last written. Monotonic seconds."""
        return self._children.progressed_at

    def drain(self) -> None:
        self._children.stop()

    async def sort(self, files: list[File]) -> list[File]:
        """The same files; those to be unpacked are marked as containers."""
        if not any(file.regular and self._kind_of(file.inbox, file.path) for file in files):
            return files
        return await to_thread.run_sync(self._sort, files, abandon_on_cancel=True)

    async def run(self, coordinator: UnpackerHome) -> None:
        """Unpack until cancelled."""
        self._coordinator = coordinator
        async with anyio.create_task_group() as tasks:
            for _ in range(min(MOST_AT_ONCE, max(AT_ONCE, count_cores() // CORES))):
                tasks.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            await self._unpack(await self._next())

    async def _next(self) -> Job:
        """Wait for the next file. One of the tasks asks."""
        async with self._asking:
            while True:
                asked_at = anyio.current_time()
                if job := await self._coordinator.next_container(self):
                    return job
                # With many images that are to be processed again the answer takes long, and the ledger has other work.
                answered_in = anyio.current_time() - asked_at
                await anyio.sleep(min(LONGEST_PAUSE_SECONDS, PAUSE_SHARE * answered_in))
                await self._coordinator.pause(PAUSE_SECONDS)

    def _kind_of(self, inbox: int, path: bytes) -> str:
        return kind_of(path, self._inboxes[inbox].unpack) if inbox in self._inboxes else ""

    def _sort(self, files: list[File]) -> list[File]:
        return [
            file._replace(container=file.regular and self._is_container(file.inbox, file.path))
            for file in files
        ]

    def _is_container(self, inbox: int, path: bytes) -> bool:
        kind = self._kind_of(inbox, path)
        if kind == TIFF:  # with a single page it is an image
            with contextlib.suppress(OSError), self._opened(inbox, path) as fd:
                return has_further_pages(fd)
            return False
        return bool(kind)

    async def _unpack(self, job: Job) -> None:
        kind = self._kind_of(job.inbox, job.path)
        if not kind:  # it had one by the configuration of an earlier start
            await self._coordinator.take_as_image(job)
            return
        try:
            result = await to_thread.run_sync(self._try, job, kind, abandon_on_cancel=True)
        except UnpackingStopped:
            self._coordinator.let_go([job.id])
            return
        if isinstance(result, Unpacked):
            await self._end(await self._take_out(job, result))
        else:
            attempt = Attempt(job, failure=result, gone=result is None)
            await self._end(self._judge.endings([attempt])[0])

    async def _take_out(self, job: Job, result: Unpacked) -> Ending:
        """Admit what was in it; returns how the file itself ends."""
        outcome = result.outcome
        for found in await to_thread.run_sync(self._list_files, job, result.folder, abandon_on_cancel=True):
            await self._coordinator.admit(found)
        ending = self._judge.failed(job, outcome.describe(result.folder), time.time())
        if ending.status is not JobStatus.SKIPPED:
            return ending
        log.info("unpacked", path=os.fsdecode(job.path), files=outcome.files)
        record = self._coordinator.record_of(ending)
        send_away = self._destinations[job.inbox].send_away
        try:
            await self._coordinator.retry.in_thread("inbox", send_away, record)
        except Held as trouble:
            if not str(trouble).endswith(WRITTEN):
                why = f"it was unpacked, but{str(trouble).removeprefix('an image')}"
                return self._judge.failed(job, Failure(Reason.CONTAINER, why), time.time())
        return ending

    async def _end(self, ending: Ending) -> None:
        coordinator = self._coordinator
        committed = await coordinator.end([ending])  # may replace it, as in a folder that is not mounted
        records = [coordinator.record_of(each) for each in committed.published()]
        publication = await coordinator.retry.in_thread(
            "results", publish_records, records, self._destinations
        )
        await coordinator.note_published(Published(*committed, publication))

    # In a thread

    def _try(self, job: Job, kind: str) -> Unpacked | Failure | None:
        """Why it was not unpacked, or None if it is gone. Raises Stopped."""
        try:
            return self._take_apart(job, kind)
        except Gone:
            return None
        except Interrupted as trouble:
            return Failure(Reason.CONTAINER, str(trouble), transient=True)
        except NoRoom as trouble:
            waits = not (trouble.is_new or self._once)
            if waits:
                self._log_wait(job, cause_of(trouble))
            return Failure(
                Reason.CONTAINER,
                "what is in it would nearly fill the disk of the inbox; make room, then use `visiond retry`",
                transient=True,
                away=waits,
            )
        except OSError as error:
            if error.errno in (*SCARCE, *AWAY):
                self._log_wait(job, cause_of(error))
                return Failure(Reason.CONTAINER, f"{error.strerror}", transient=True, away=True)
            if error.errno == errno.ETXTBSY:
                return Failure(Reason.CONTAINER, WRITTEN, written=True)
            problem = f"it cannot be read, or unpacked into its inbox: {error.strerror}"
            return Failure(Reason.CONTAINER, problem, transient=error.errno in (*PASSING, errno.EROFS))
        except UnpackingStopped:
            raise
        except Exception as error:
            log.error("unpacking failed", path=os.fsdecode(job.path), exc_info=True)
            return Failure(
                Reason.CONTAINER, f"unpacking failed: {type(error).__name__}: {error}", transient=True
            )

    def _take_apart(self, job: Job, kind: str) -> Unpacked:
        """Raises Gone, Stopped, Interrupted, NoRoom, OSError."""
        destination, moved = self._destinations[job.inbox], bool(job.location)
        folder, name = os.path.split(job.path)
        names = [each + FOLDER for each in (name, numbered_name(name, job.id))]
        is_kept = destination.on_success == "keep"
        with self._opened_folder(job, folder) as parent:
            target, mark = choose_target(parent, names, job.version, moved=moved, replaces=is_kept)
            path = os.path.join(folder, target)
            if mark and mark.is_whole:  # by a daemon that was killed
                return Unpacked(path, UnpackOutcome(mark.files, mark.links))
            if not mark and exists(parent, target) and not mark_of(parent, target):
                problem = f"{os.fsdecode(target)} is in the way; move or rename it"
                return Unpacked(path, UnpackOutcome(0, problem=problem))
            if is_still_written(job.location or os.path.join(destination.inbox, job.path), job.seen_at):
                raise OSError(errno.ETXTBSY, WRITTEN)
            with self._opened_job(job) as fd:
                return Unpacked(path, self._fill(job, kind, fd, parent, target, mark))

    def _fill(
        self, job: Job, kind: str, fd: int, parent: int, target: bytes, mark: Mark | None
    ) -> UnpackOutcome:
        """Raises Gone, Stopped, Interrupted, NoRoom, OSError."""
        settings, limits = self._settings, self._limits
        folder = os.path.join(os.path.dirname(job.path), target)
        longest = self._destinations[job.inbox].longest_path - len(folder) - 1
        most = Most(settings.most_files, settings.most_bytes, longest, settings.most_ratio)
        ignored = ignored_by(self._inboxes[job.inbox].ignore)

        def is_ignored(member: bytes) -> bool:
            return ignored.hides(os.path.join(folder, member))

        rules = Rules(settings.dpi, settings.video_seconds, limits.max_pixels)
        with contextlib.closing(Contents(parent, target, job.version, most, is_ignored, mark)) as contents:
            outcome = take_apart(fd, kind, contents, rules, limits, self._children)
            if not job.version.is_of(os.fstat(fd), moved=bool(job.location)):
                raise Gone
            if outcome.files:
                contents.place(is_whole=not outcome.problem)
        return outcome

    def _list_files(self, job: Job, folder: bytes) -> list[list[File]]:
        """What was in it, in groups."""
        root = self._destinations[job.inbox].inbox
        ignored = ignored_by(self._inboxes[job.inbox].ignore)
        found = Walk(root, ignored, True, Unread(root, logs=False)).files(folder)
        files = [File(job.inbox, path, Version.of(status)) for path, status in filter(None, found)]
        return [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]

    @contextlib.contextmanager
    def _opened(self, inbox: int, path: bytes, location: bytes = b"") -> Iterator[int]:
        """A descriptor of a file, or of a folder, of an inbox."""
        fd = os.open(location, READ) if location else open_beneath(self._destinations[inbox].inbox, path)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _opened_job(self, job: Job) -> Iterator[int]:
        """Its file. Raises Gone, OSError."""
        with contextlib.ExitStack() as stack:
            with vanishing():
                fd = stack.enter_context(self._opened(job.inbox, job.path, job.location))
            if not job.version.is_of(os.fstat(fd), moved=bool(job.location)):
                raise Gone
            yield fd

    @contextlib.contextmanager
    def _opened_folder(self, job: Job, folder: bytes) -> Iterator[int]:
        """The folder in the inbox where it is or, if the daemon has moved it, was. Raises Gone, OSError."""
        with contextlib.ExitStack() as stack:
            with vanishing():
                fd = stack.enter_context(self._opened(job.inbox, b"." if job.location else folder or b"."))
                if job.location:
                    fd = stack.enter_context(made_inner(fd, [part for part in folder.split(b"/") if part]))
            yield fd

    def _log_wait(self, job: Job, why: str) -> None:
        """Once for each file."""
        if job.id not in self._waits:
            self._waits.add(job.id)
            log.warning("unpacking waits", path=os.fsdecode(job.path), why=why)


@contextlib.contextmanager
def vanishing() -> Iterator[None]:
    """Raises Gone for what is not there."""
    try:
        yield
    except OSError as error:
        if error.errno in VANISHED:
            raise Gone from error
        raise


def open_unpacker(
    config: Config,
    inboxes: Mapping[int, Inbox],
    destinations: Mapping[int, Destination],
    judge: Judge,
    *,
    once: bool = False,
) -> Unpacker | None:
    """None if no inbox has anything to unpack. Raises MissingLibrary."""
    wanted = {kind for inbox in inboxes.values() for kind in inbox.unpack}
    if missing := find_missing(wanted):
        raise MissingLibrary(f"{missing}.")
    return Unpacker(config, inboxes, destinations, judge, once=once) if wanted else None
