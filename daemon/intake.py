"""Reading files: once, straight into the slab, with their digest; and never a version other than the ledger's."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio
from anyio import to_thread
from anyio.abc import TaskStatus

from daemon.beneath import READ, open_beneath
from daemon.errors import SCARCE
from daemon.jobs import Failure, Job, Version
from daemon.persistence import Persistence
from daemon.slab import Slab
from stages.base import Reason

_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.ESTALE)
LATE_SECONDS = 2.0  # that an inbox may take over a group of files before the others go on without it


@dataclass(eq=False, slots=True)
class Reading:
    """Jobs of one inbox whose files are being read."""

    jobs: list[Job]
    done: anyio.Event = field(default_factory=anyio.Event)


class Intake:
    """Reads the files of all inboxes. Each has a thread and a share of the slab of its own, so that a mount that dies in the
    middle of a file holds up no other inbox.

    take_on: is given what has been read.
    """

    def __init__(
        self, slab: Slab, roots: Mapping[int, bytes], persist: Persistence, take_on: Callable[[list[Job]], Awaitable[None]]
    ) -> None:
        self._slab = slab
        self._roots = roots
        self._persist = persist
        self._take_on = take_on
        self._threads = {inbox: anyio.CapacityLimiter(1) for inbox in roots}
        self.share = slab.size // (2 * len(roots))  # bytes that are read at once: all that hang leave the others half of it
        self._late: set[Reading] = set()

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """What is late is read to its end in here."""
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            await anyio.sleep_forever()

    async def read(self, jobs: list[Job]) -> None:
        """Have the files read and taken on, those of an inbox that is late when they come."""
        if not jobs:
            return
        inboxes = dict.fromkeys(job.inbox for job in jobs)
        readings = {inbox: Reading([job for job in jobs if job.inbox == inbox]) for inbox in inboxes}
        for inbox, reading in readings.items():
            self._tasks.start_soon(self._read, inbox, reading)
        with anyio.move_on_after(LATE_SECONDS):
            for reading in readings.values():
                await reading.done.wait()
        late = {inbox: reading for inbox, reading in readings.items() if not reading.done.is_set()}
        self._late.update(late.values())
        await self._take_on([job for job in jobs if job.inbox not in late])

    async def _read(self, inbox: int, reading: Reading) -> None:
        reserved = [job for job in reading.jobs if job.extent]
        in_thread = partial(to_thread.run_sync, abandon_on_cancel=True, limiter=self._threads[inbox])
        await self._persist("inbox", in_thread, read_files, reserved, self._slab, self._roots)
        reading.done.set()
        if reading in self._late:
            await self._take_on(reading.jobs)
            self._late.remove(reading)

    def late(self) -> set[int]:
        """The inboxes that are waited for no longer."""
        return {reading.jobs[0].inbox for reading in self._late}

    def waiting(self) -> int:
        """How many jobs wait for inboxes that are late."""
        return sum(len(reading.jobs) for reading in self._late if not reading.done.is_set())


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
    fd = os.open(job.location, READ) if job.location else open_beneath(roots[job.inbox], job.path)
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


def _is_version(fd: int, version: Version) -> bool:
    status = os.fstat(fd)
    return stat.S_ISREG(status.st_mode) and Version.of(status) == version
