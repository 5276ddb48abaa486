"""Takes archives, documents and videos apart, and puts what was in them into their inbox.

Such a file waits in the ledger like an image, in a line of its own (ledger/waiting.py). What was in inbox/a.zip comes
into the folder inbox/a.zip.unpacked, and each file there is an image like any other: with its own row, result and
bin, and moved or deleted as the inbox's on_success says. The archive itself is SKIPPED for the reason `unpacked`, or
FAILED for the reason `container`; then what could be read is there all the same. Of a TIFF, the first page stays the
image that it is without unpacking.

A crash at any moment loses nothing: the row is PENDING until the files have rows of their own, and a folder that is
complete says of which version it is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

import anyio
import structlog
from anyio import to_thread

from daemon.config.loading import Config
from daemon.config.sections import Inbox
from daemon.hints import quantity
from daemon.inbox import sources
from daemon.inbox.walk import Unread, Walk, compile_ignored
from daemon.jobs import Ending, Failure, File, Job, JobStatus, Version
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Record
from daemon.limit import Limit
from daemon.results.destinations import Destination, publish_records
from daemon.results.judge import Judge
from daemon.stations.station import Published, published_of
from daemon.system.beneath import READ, open_beneath
from daemon.system.retry import Retry
from daemon.system.scarcity import AWAY, SCARCE
from daemon.unpacking.apart import Children, Gone, Outcome, Stopped, take_apart
from daemon.unpacking.folder import Most, target_of
from daemon.unpacking.kinds import check_libraries, kind_of
from daemon.unpacking.members import Rules
from stages.base import Reason
from stages.decoding.pages import count_pages

log = structlog.get_logger()

AT_ONCE = 2  # files that are taken apart
CHUNK = 512  # files that get their rows together
PAUSE_SECONDS = 1.0  # between two looks for more
TIFF = "tiff"


class Coordinator(Protocol):
    """What an unpacker needs of the pipeline."""

    ledger: Ledger
    retry: Retry
    limit: Limit | None
    in_flight: dict[int, Job]

    def answering(self) -> set[int]: ...
    def must_wait(self, job: Job) -> bool: ...
    def take(self, job: Job) -> bool: ...
    def let_go(self, jobs: Sequence[Job]) -> None: ...
    def wake(self) -> None: ...
    def records_of(self, endings: Sequence[Ending]) -> list[Record]: ...
    async def admit(self, files: list[File]) -> None: ...
    async def end(self, endings: list[Ending]) -> set[int]: ...
    async def note_published(self, group: Published) -> None: ...


class Unpacker:
    """Works beside the stations, on two files at a time."""

    def __init__(
        self,
        coordinator: Coordinator,
        config: Config,
        inboxes: Mapping[int, Inbox],
        destinations: Mapping[int, Destination],
        judge: Judge,
    ) -> None:
        """inboxes: by number."""
        self._coordinator = coordinator
        self._inboxes = {number: inbox for number, inbox in inboxes.items() if inbox.unpack}
        self._destinations = destinations
        self._judge = judge
        self._limits = config.pipeline.limits()
        self._settings = config.unpacking
        self._children = Children()
        self._asking = anyio.Lock()
        self._sorted = anyio.Event()  # set when there is more to unpack
        self._is_draining = False

    @property
    def progressed_at(self) -> float:
        """When a part of a file was last written. Monotonic seconds."""
        return self._children.progressed_at

    def drain(self) -> None:
        self._is_draining = True
        self._children.stop()

    async def sort(self, files: list[File]) -> list[File]:
        """The same files; those to be unpacked are marked as containers."""
        if not any(file.regular and self._kind_of(file.inbox, file.path) for file in files):
            return files
        self._sorted.set()
        return await to_thread.run_sync(self._sort, files)

    async def has_more(self) -> bool:
        """Whether files wait that can be unpacked in this run."""
        if self._is_draining or not self._has_room():
            return False
        coordinator = self._coordinator
        answer: bool = await coordinator.retry(
            "ledger", coordinator.ledger.has_containers, coordinator.answering()
        )
        return answer

    async def run(self) -> None:
        """Unpack until cancelled."""
        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE):
                tasks.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            async with self._asking:
                while not (job := await self._next()):
                    self._sorted = anyio.Event()
                    with anyio.move_on_after(PAUSE_SECONDS):
                        await self._sorted.wait()
            await self._unpack(job)

    async def _next(self) -> Job | None:
        coordinator = self._coordinator
        if self._is_draining or not self._has_room():
            return None
        jobs = await coordinator.retry(
            "ledger",
            coordinator.ledger.next_jobs,
            1,
            coordinator.in_flight,
            coordinator.answering(),
            containers=True,
        )
        if not jobs:
            return None
        if coordinator.must_wait(jobs[0]):  # an earlier version of the same file is in work
            coordinator.ledger.read_again()
            return None
        coordinator.take(jobs[0])
        if coordinator.limit:
            coordinator.limit.take(jobs)
        return jobs[0]

    def _has_room(self) -> bool:
        limit = self._coordinator.limit
        return limit is None or limit.room > 0

    def _kind_of(self, inbox: int, path: bytes) -> str:
        return kind_of(path, self._inboxes[inbox].unpack) if inbox in self._inboxes else ""

    def _sort(self, files: list[File]) -> list[File]:
        return [
            file._replace(container=file.regular and self._is_container(file.inbox, file.path))
            for file in files
        ]

    def _is_container(self, inbox: int, path: bytes) -> bool:
        kind = self._kind_of(inbox, path)
        return self._has_pages(inbox, path) if kind == TIFF else bool(kind)

    def _has_pages(self, inbox: int, path: bytes) -> bool:
        """Whether a TIFF has more than one."""
        with contextlib.suppress(OSError, ValueError), self._opened(inbox, path) as file:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data, memoryview(data) as view:
                return count_pages("TIFF", view) > 1
        return False

    def _opened(self, inbox: int, path: bytes, location: bytes = b"") -> IO[bytes]:
        root = self._destinations[inbox].inbox
        return open(os.open(location, READ) if location else open_beneath(root, path), "rb", buffering=0)

    async def _unpack(self, job: Job) -> None:
        kind = self._kind_of(job.inbox, job.path)
        try:  # it has no kind by the configuration of an earlier start
            ending = await self._take_out(job, kind) if kind else None
        except Stopped:
            self._coordinator.let_go([job])
            return
        if ending:
            await self._end(ending)
        else:
            await self._take_as_image(job)

    async def _take_out(self, job: Job, kind: str) -> Ending | None:
        """Bring what is in it into the inbox; returns how the file itself ends. None: it is an image. Raises Stopped."""
        try:
            outcome = await to_thread.run_sync(self._take_apart, job, kind, abandon_on_cancel=True)
        except Gone:
            job.gone = True
            return self._judge.endings([job])[0]
        except OSError as error:
            return self._judge.failed(job, self._explain(job, error), time.time())
        for found in await to_thread.run_sync(self._list_files, job):
            await self._coordinator.admit(found)
        path, files = os.fsdecode(job.path), quantity(outcome.files, "file")
        if outcome.problem:
            log.warning("not everything was unpacked", path=path, files=outcome.files, why=outcome.problem)
        else:
            log.info("unpacked", path=path, files=outcome.files)
        if kind == TIFF:
            return None
        if outcome.problem:
            failure = Failure(Reason.CONTAINER, f"{files} unpacked; {outcome.problem}")
            return self._judge.failed(job, failure, time.time())
        folder = os.fsdecode(os.path.basename(target_of(b"", job.path)))
        failure = Failure(Reason.UNPACKED, f"{files} in {folder}")
        ending = Ending(job, JobStatus.SKIPPED, time.time(), job.attempts + 1, failure=failure)
        record = self._coordinator.records_of([ending])[0]
        await self._coordinator.retry.in_thread("results", self._send_away, record)
        return ending

    async def _end(self, ending: Ending) -> None:
        coordinator = self._coordinator
        ended = await coordinator.end([ending])
        records = coordinator.records_of(published_of([ending], ended))
        publication = await coordinator.retry.in_thread(
            "results", publish_records, records, self._destinations
        )
        await coordinator.note_published(Published([ending], ended, publication))

    async def _take_as_image(self, job: Job) -> None:
        """A station gets it next."""
        coordinator = self._coordinator
        await coordinator.retry("ledger", coordinator.ledger.take_as_image, job)
        if coordinator.limit:
            coordinator.limit.take_back(job)
        coordinator.let_go([job])
        coordinator.wake()

    # In a thread

    def _take_apart(self, job: Job, kind: str) -> Outcome:
        """Raises Gone, Stopped, OSError."""
        destination, settings = self._destinations[job.inbox], self._settings
        target = target_of(destination.inbox, job.path)
        longest = destination.longest_path - len(target_of(b"", job.path)) - 1
        try:
            file = self._opened(job.inbox, job.path, job.location)
        except OSError as error:
            raise Gone from error
        with file:
            if not job.version.is_of(os.fstat(file.fileno()), moved=bool(job.location)):
                raise Gone
            return take_apart(
                file.fileno(),
                kind,
                target,
                job.version,
                Rules(settings.dpi, settings.video_seconds, self._limits.max_pixels),
                self._limits,
                Most(settings.files, settings.bytes, longest),
                compile_ignored(self._inboxes[job.inbox].ignore),
                self._children,
            )

    def _list_files(self, job: Job) -> list[list[File]]:
        """What was in it, in groups."""
        root = self._destinations[job.inbox].inbox
        ignored = compile_ignored(self._inboxes[job.inbox].ignore)
        found = Walk(root, ignored, True, Unread(root, logs=False)).files(target_of(b"", job.path))
        files = [File(job.inbox, path, Version.of(status)) for path, status in filter(None, found)]
        return [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]

    def _send_away(self, record: Record) -> None:
        """Move or delete the file, as the inbox says."""
        destination = self._destinations[record.inbox]
        if destination.on_success == "move":
            sources.move(record, os.path.join(destination.done, record.path))
        elif destination.on_success == "delete":
            sources.delete(record)

    def _explain(self, job: Job, error: OSError) -> Failure:
        if error.errno in (*SCARCE, *AWAY):
            log.warning("unpacking waits", path=os.fsdecode(job.path), why=error.strerror)
            return Failure(Reason.CONTAINER, f"{error.strerror}", transient=True, away=True)
        folder = os.fsdecode(target_of(b"", job.path))
        return Failure(Reason.CONTAINER, f"the folder {folder} cannot be written: {error.strerror}")


def open_unpacker(
    coordinator: Coordinator,
    config: Config,
    inboxes: Mapping[int, Inbox],
    destinations: Mapping[int, Destination],
    judge: Judge,
) -> Unpacker | None:
    """None if no inbox has anything to unpack. Raises MissingLibrary."""
    wanted = {kind for inbox in inboxes.values() for kind in inbox.unpack}
    check_libraries(wanted)
    return Unpacker(coordinator, config, inboxes, destinations, judge) if wanted else None
