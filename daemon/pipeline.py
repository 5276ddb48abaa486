"""Read this first: the life of an image, step by step. The coordinator, here, watches the inboxes, owns the
ledger and hands out jobs. A station (stations/station.py) does the work on each image.

    here 1     watch, admit   a file is complete (inbox/watcher.py), or was in another (unpacking/): it gets a row
    here 2     next_jobs      a station asks for jobs
    station 1  _feed          their bytes come into shared memory, known results from the ledger
    station 2  lane, advance  a batch (workers/lane.py) runs through the stages of a worker (workers/chain.py)
    station 3  _pass_on       to the next segment, or to the end
    station 4  _finish        the result is committed (here 3: end): from now on it is durable
    station 4  _publish       sidecar, bin and source: results/destinations.py
    here 4     confirm        all of that is on the disk; results/outbox.py takes it on to the sinks

Every step is bounded: a station asks for jobs when it has room for their bytes, and forms a batch only when a
worker has a free slot. So the slowest GPU limits how fast files are read, and the number of files costs no
memory. A job is PENDING in the ledger until its station has finished it; what a crash interrupts is done again.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence

import anyio
import structlog

from daemon.inbox.absence import Absences
from daemon.inbox.watcher import Watcher
from daemon.jobs import Ending, File, Job, JobStatus
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Record
from daemon.limit import Limit
from daemon.looks.claims import Claims
from daemon.looks.running import RunningLook, finish_looks
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import StationState
from daemon.results.destinations import Destination
from daemon.results.judge import Judge
from daemon.results.outbox import Outbox
from daemon.results.publisher import Publisher
from daemon.stations.remote import RemoteStation
from daemon.stations.shift import Shift
from daemon.stations.station import Published, Station
from daemon.system.clock import steady_seconds
from daemon.system.queues import drain
from daemon.system.retry import Retry
from daemon.unpacking.unpacker import Unpacker

log = structlog.get_logger()

FEED = 64  # jobs fetched, read and digested together
UNCONFIRMED = 32  # groups that may be published but not yet confirmed to be on the disk


class Pipeline:
    """Takes every file of the inboxes to a result or a failure. It owns none of its parts;
    all of them are passed in."""

    def __init__(
        self,
        ledger: Ledger,
        watcher: Watcher,
        stations: Sequence[Station | RemoteStation],
        judge: Judge,
        destinations: Mapping[int, Destination],
        metrics: Metrics,
        *,
        outbox: Outbox | None = None,
        retry: Retry | None = None,
        reuse_results: bool = True,
    ) -> None:
        self.ledger = ledger
        self.watcher = watcher
        self.shifts = [Shift(station, self) for station in stations]  # an exchange of models replaces them
        self.metrics = metrics
        self.looks: list[RunningLook] = []
        self.unpacker: Unpacker | None = None
        self.in_flight: dict[int, Job] = {}
        self.retry = retry or Retry()
        self.outbox = outbox or Outbox()
        self.publisher = Publisher(
            ledger, destinations, self.outbox, self.retry, self._is_busy, metrics.counts.changed
        )
        self._judge = judge
        self._reuse_results = reuse_results
        self._roots = {inbox: destination.inbox for inbox, destination in destinations.items()}
        self.absences = Absences(self._roots)
        self._finished_at = time.monotonic()  # when an image was last finished
        self._recovered: set[int] = set()  # inboxes
        self.claims = Claims()
        self._owed: set[tuple[int, bytes]] = set()  # of those that a lost station may not have published
        self._returns = 0  # times that jobs came back from a station
        self._finished: set[int] = set()  # images, with a limit
        self._destinations = destinations
        self.bins: dict[str, None] = {}  # that images got in this run
        self._deferred: list[Job] = []  # while another version of their file is in flight or being published
        self._handing_out = anyio.Lock()
        self._handed_out = anyio.Event()
        self._published: asyncio.Queue[Published] = asyncio.Queue(UNCONFIRMED)
        self._admitted = asyncio.Event()
        self._landed = asyncio.Event()
        self._watching = anyio.CancelScope()
        self._complete = False  # no more files will be admitted
        self.found_all = False  # every file that was there at the start, with `once`
        self.limit: Limit | None = None
        self.draining = False

    async def run(self, *, once: bool = False, limit: int = 0) -> None:
        """Work until drained. With `once`, stop when every file that is there is finished; with a limit,
        after that many."""
        self.limit = Limit(limit) if limit else None
        async with anyio.create_task_group() as tasks:
            for task in (self.confirm, self.publisher.release, self.outbox.run):
                tasks.start_soon(task)
            tasks.start_soon(self.watch, once)
            for shift in self.shifts:
                tasks.start_soon(shift.run)
            for look in self.looks:
                tasks.start_soon(look.run)
            if self.unpacker:
                tasks.start_soon(self.unpacker.run)
            await self._handed_out.wait()
            while self.in_flight:
                self._landed.clear()
                await self._landed.wait()
            await finish_looks(self.looks, self._landed)
            if self._owed:  # of a station that was lost only now
                await self.recover({inbox for inbox, _ in self._owed})
            await self.outbox.finish()
            tasks.cancel_scope.cancel()
        if once and not self.draining:
            await self.publisher.try_again()

    def held_back(self) -> list[str]:
        """Why some images wait while others go on."""
        return self.watcher.held_back() + self.absences.held_back() + self.publisher.held_back()

    def drain(self, seconds: float = math.inf) -> None:
        """Take no more images, and release those that wait for a worker.
        `run` returns when the rest is finished.

        seconds: the time for that. The sinks get half of it at most.
        """
        self.draining = self.retry.hurried = True
        self._watching.cancel()
        self._admitted.set()
        self.outbox.drain(seconds / 2)
        parts: list[Shift | RunningLook | Unpacker] = [*self.shifts, *self.looks]
        for part in parts + ([self.unpacker] if self.unpacker else []):
            part.drain()

    @property
    def stations(self) -> list[Station | RemoteStation]:
        return [shift.station for shift in self.shifts]

    @property
    def unfinished(self) -> int:
        """Images in flight, and those that a lost station has left to be published here."""
        return len(self.in_flight) + len(self._owed)

    @property
    def has_sinks(self) -> bool:
        return bool(self.outbox.deliveries)

    def states(self) -> list[StationState]:
        return [station.state() for station in self.stations]

    @property
    def progressed_at(self) -> float:
        """When a batch last began or ended, or an image was last finished. Monotonic seconds."""
        unpacked_at = self.unpacker.progressed_at if self.unpacker else 0.0
        return max([self._finished_at, unpacked_at, *(state.progressed_at for state in self.states())])

    def blocked(self) -> list[str]:
        """Why nothing can be read or written: for example, the disk is full."""
        reasons = self.retry.blocked() + [reason for state in self.states() for reason in state.blocked]
        return list(dict.fromkeys(reasons))

    def wake(self) -> None:
        """There are jobs that `admit` has not seen: images to be retried, or to be processed again."""
        self._admitted.set()
        if self.unpacker:
            self.unpacker.line.wake()

    async def recover(self, inboxes: set[int]) -> None:
        """Publish what is owed, before anything else of the same inbox: by the last daemon or a station that was lost."""
        owed = {path for path in self._owed if path[0] in inboxes}
        await self.claims.wait_for(owed)  # otherwise they are skipped
        await self.publisher.publish_owed(inboxes)
        self._owed -= owed
        again = {inbox for inbox, _ in self._owed}
        self.publisher.expect(again)
        self._recovered |= inboxes - again

    # 1. A file appears and is complete.

    async def watch(self, once: bool) -> None:
        with self._watching:
            if once:  # else `Publisher.watch` does it
                await self.publisher.look_again()
            await self.watcher.run(self.admit, self.wake, once=once)
            self.found_all = True
        self._complete = True
        self._admitted.set()

    async def admit(self, files: list[File]) -> None:
        """Write a row for each new version of files of one inbox. A backlog of a million files is a million rows,
        not a million objects in memory."""
        if self.unpacker:
            files = await self.unpacker.sort(files)
        admitted = await self.retry("ledger", self.ledger.admit, files)
        self.metrics.admitted(admitted, files[0].inbox if files else 0)
        if admitted.pending:
            self.wake()

    # 2. A station asks for jobs.

    async def next_jobs(self) -> list[Job]:
        """Wait for the next jobs; an empty list when there will be no more. A job waits while another version of its file is
        in flight, so that their sidecars are written in order."""
        async with self._handing_out:
            while found := await self._next_jobs():
                if jobs := [job for job in found if self.take(job)]:
                    self.absences.begin({job.inbox for job in jobs})
                    return jobs
            self._handed_out.set()
            return []

    def take(self, job: Job) -> bool:
        """It is in work from now on; False if it has to wait."""
        if self.must_wait(job):
            self._deferred.append(job)
            return False
        self.in_flight[job.id] = job
        self.claims.jobs.add((job.inbox, job.path))
        return True

    def must_wait(self, job: Job) -> bool:
        path = (job.inbox, job.path)
        return path in self._owed or self._is_busy(*path) or self.publisher.is_busy(*path)

    def _is_busy(self, inbox: int, path: bytes) -> bool:
        """Whether a version of this file is in flight, or its second look is being published."""
        return (inbox, path) in self.claims

    async def _next_jobs(self) -> list[Job]:
        """As `next_jobs`. Files of an inbox that does not answer are neither read nor moved."""
        while not self.draining:
            if not all(map(self.must_wait, self._deferred)):
                found, self._deferred = self._deferred, []
                return found
            self._admitted.clear()
            complete, answering = self._complete, self.answering()
            # What is passed over now may be due by the time that the ledger has answered.
            busy, resting = bool(self.in_flight), self.absences.resting()
            with anyio.CancelScope(shield=True):  # A station that asks may be lost meanwhile.
                await self.recover(answering - self._recovered)
            lasting = self.absences.lasting() if complete else set()
            returns, asked_at = self._returns, steady_seconds()
            jobs = await self._next_of(answering, complete)
            if returns != self._returns:  # These jobs may be behind what was just read.
                self.ledger.read_again()
            if jobs:
                return jobs
            pause = await self.retry("ledger", self.ledger.seconds_to_next_try, asked_at, lasting)
            nothing_waits = pause is None and not (resting | self.absences.resting()) - lasting
            waiting = {job.inbox for job in self._deferred} | {inbox for inbox, _ in self._owed}
            in_hand = busy or self.in_flight or waiting - lasting or self._admitted.is_set()
            is_idle = complete and not in_hand and returns == self._returns
            is_over = is_idle and (nothing_waits or (self.limit and self.limit.is_over))
            if is_over and not (self.unpacker and await self.unpacker.line.has_more()):
                break
            with anyio.move_on_after(1.0 if pause is None else min(pause, 1.0)):
                await self._admitted.wait()
        return []

    def answering(self) -> set[int]:
        """The inboxes whose files can be read now."""
        return self.watcher.answering() - self.absences.resting()

    async def _next_of(self, inboxes: set[int], complete: bool) -> list[Job]:
        """The next jobs of these inboxes. With a limit there are none until all files are found, because
        the highest priority comes first; once enough have been taken, only their retries follow."""
        limit = self.limit
        busy = self.in_flight.keys() | {job.id for job in self._deferred}
        if not limit:
            return await self.retry("ledger", self.ledger.next_jobs, FEED, busy, inboxes)
        if not complete or limit.is_over:
            return []
        only = None if limit.room else limit.postponed
        most = min(FEED, limit.room or FEED)
        jobs = await self.retry("ledger", self.ledger.next_jobs, most, busy, inboxes, only)
        limit.take(jobs)
        return jobs

    # 3. The station asks and reports what concerns the ledger, in groups.

    async def note_read(self, jobs: Sequence[Job]) -> None:
        self.absences.note([job for job in jobs if job.reserved])
        if self._reuse_results:
            await self.retry("ledger", self.ledger.recall, [job for job in jobs if job.digest])

    async def keep(self, jobs: Sequence[Job]) -> None:
        await self.retry("ledger", self.ledger.keep, jobs)

    async def blame(self, job: Job) -> None:
        await self.retry("ledger", self.ledger.blame, job)

    async def end(self, endings: list[Ending]) -> set[int]:
        if doubtful := [ending.job for ending in endings if ending.is_doubtful]:
            hidden = await self.watcher.find_hidden(doubtful, self.publisher.check_folders)
            self.absences.keep(hidden, endings, self._judge)
        ended = await self.retry("ledger", self.ledger.end, endings, self._judge.endings)
        if new := {ending.bin for ending in endings if ending.bin} - self.bins.keys():
            self.bins |= dict.fromkeys(sorted(new))
            for destination in self._destinations.values():
                destination.known_bins.update(map(os.fsencode, new))
        return ended

    def records_of(self, endings: Sequence[Ending]) -> list[Record]:
        return [self.ledger.record_of(ending) for ending in endings]

    async def note_published(self, group: Published) -> None:
        self.publisher.note(group.publication)
        await self._published.put(group)

    async def take_back(self, jobs: Sequence[Job], endings: Sequence[Ending], ended: set[int]) -> None:
        """A station was lost. Its jobs are handed out again; what it had committed is published here."""
        self._owe(endings, ended)
        self._leave(endings, ended)
        self.let_go(jobs)

    def _owe(self, endings: Sequence[Ending], ended: set[int]) -> None:
        """Publish them again, before anything else of the same inboxes."""
        owed = {(e.job.inbox, e.job.path) for e in endings if e.job.id in ended}
        self._owed |= owed
        self.publisher.expect({inbox for inbox, _ in owed})
        self._recovered -= {inbox for inbox, _ in owed}

    def let_go(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._forget(job)
            if self.limit and not self.draining:
                self.limit.take_back(job)
        self._returns += 1
        self.ledger.read_again()
        self._landed.set()
        self._admitted.set()

    def _forget(self, job: Job) -> None:
        del self.in_flight[job.id]
        self.claims.release_job((job.inbox, job.path))

    def looked_for(self) -> set[int] | None:
        """The only images that may get a second look in this run; None: all."""
        return self._finished if self.limit else None

    # 4. The results are confirmed to be on the disk. results/outbox.py takes them on to the sinks.

    async def confirm(self) -> None:
        """Mark as published only what would survive a power failure.
        Groups that arrived during one sync share the next."""
        while True:
            groups = [await self._published.get(), *drain(self._published)]
            if not await self.publisher.confirm([group.publication for group in groups]):
                self._recovered.clear()  # second looks are owed too
                for group in groups:
                    self._owe(group.endings, group.ended)
            self._finished_at = time.monotonic()
            for group in groups:
                self._leave(group.endings, group.ended)
                if group.confirmed:
                    group.confirmed.set()
            for look in self.looks:
                look.desk.wake()
            self._landed.set()
            self._admitted.set()

    def _leave(self, endings: Sequence[Ending], ended: set[int]) -> None:
        for ending in endings:
            self._forget(ending.job)
            if self.limit:
                self.limit.leave(ending)
        lasting = [e for e in endings if e.status is JobStatus.PENDING or e.job.id in ended]
        if self.limit:
            self._finished |= ended
        self.metrics.finished(lasting)
        for ending in lasting:
            if (failure := ending.failure) and failure.is_logged:
                log.warning(
                    "image failed" if ending.status is JobStatus.FAILED else "image not done",
                    inbox=os.fsdecode(self._roots[ending.job.inbox]),
                    path=os.fsdecode(ending.job.path),
                    outcome=ending.status.name,
                    reason=failure.reason.value,
                    detail=failure.detail,
                )
