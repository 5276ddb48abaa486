"""Unpacks archives, documents and videos, each into a folder beside it in its inbox.

Such a file waits in the ledger like an image, in a line of its own (ledger/waiting.py). inbox/a.zip is unpacked
into the folder inbox/a.zip.unpacked, and each file there is an image like any other: with its own row, result and
bin, and moved or deleted as the inbox's on_success says. The archive itself is SKIPPED for the reason `unpacked`, or
FAILED for the reason `container`; then what could be read is there all the same.

A crash at any moment loses nothing and repeats nothing: the row is PENDING until the files have rows of their own, and
a folder that is complete says of which version it is (folder.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import anyio
import structlog
from anyio import to_thread

from daemon.config.loading import Config
from daemon.config.sections import Inbox
from daemon.core.errors import MissingLibrary
from daemon.core.jobs import Attempt, Ending, Failure, File, Job, JobStatus
from daemon.inbox.sources import WRITTEN
from daemon.ledger.record import Committed, Record
from daemon.pipeline.containers import Containers, Unpacked
from daemon.pipeline.executor import Published
from daemon.results.destinations import Destination, Held, publish_records
from daemon.results.judge import Judge
from daemon.system.retry import Retry
from daemon.unpacking.apart import UnpackingStopped
from daemon.unpacking.kinds import find_missing
from stages.contract.base import Reason
from stages.contract.processes import count_cores

log = structlog.get_logger()

AT_ONCE, MOST_AT_ONCE = 2, 8
CORES = 2  # for each file
PAUSE_SECONDS = 1.0  # between two questions
PAUSE_SHARE, LONGEST_PAUSE_SECONDS = 20, 5.0  # at least so many times as long as the answer took; at most


class ContainerSource(Protocol):
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


def count_at_once(cores: int) -> int:
    """Files that are unpacked at the same time."""
    return min(MOST_AT_ONCE, max(AT_ONCE, cores // CORES))


class Unpacker:
    """Works beside the executors, on a few files at a time."""

    def __init__(self, containers: Containers, destinations: Mapping[int, Destination], judge: Judge) -> None:
        self._containers = containers
        self._destinations = destinations
        self._judge = judge
        self._asking = anyio.Lock()

    @property
    def progressed_at(self) -> float:
        """When a part of a file was last written. Monotonic seconds."""
        return self._containers.children.progressed_at

    def drain(self) -> None:
        self._containers.children.stop()

    async def sort(self, files: list[File]) -> list[File]:
        """As `Containers.sort`."""
        if not any(file.regular and self._containers.kind_of(file.inbox, file.path) for file in files):
            return files
        return await to_thread.run_sync(self._containers.sort, files, abandon_on_cancel=True)

    async def run(self, coordinator: ContainerSource) -> None:
        """Unpack until cancelled."""
        self._coordinator = coordinator
        async with anyio.create_task_group() as tasks:
            for _ in range(count_at_once(count_cores())):
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

    async def _unpack(self, job: Job) -> None:
        kind = self._containers.kind_of(job.inbox, job.path)
        if not kind:  # it had one by the configuration of an earlier start
            await self._coordinator.take_as_image(job)
            return
        try:
            result = await to_thread.run_sync(self._containers.unpack, job, kind, abandon_on_cancel=True)
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
        for found in await to_thread.run_sync(
            self._containers.list_files, job, result.folder, abandon_on_cancel=True
        ):
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
        publication = await coordinator.retry.in_thread(
            "results", publish_records, committed.published(), self._destinations
        )
        await coordinator.note_published(Published(committed.endings, committed.newest, publication))


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
    if not wanted:
        return None
    return Unpacker(Containers(config, inboxes, destinations, once=once), destinations, judge)
