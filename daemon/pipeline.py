"""Read this first: the life of an image. Each step is a method, in this order:

    watch → admit → feed → work → advance → finish → publish → confirm

Every step is bounded: `feed` waits for room in the slab, the queue of each segment is short, and a batch is formed only
when a worker has a free slot. So the slowest GPU limits how fast files are read, and the number of files costs no memory.
A job is PENDING in the ledger until `finish`; what a crash interrupts is done again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import anyio
import structlog
from anyio import to_thread

from daemon.errors import WorkerLost
from daemon.inbox.absence import Absences
from daemon.inbox.intake import read_files
from daemon.inbox.watcher import Watcher
from daemon.jobs import Ending, Failure, File, Job, JobStatus
from daemon.ledger.ledger import Ledger
from daemon.limit import Limit
from daemon.messages import Reply
from daemon.monitoring.metrics import Metrics
from daemon.results.destinations import Destination, Publication
from daemon.results.endings import Judge
from daemon.results.outbox import Outbox
from daemon.results.publisher import Publisher
from daemon.system.queues import drain
from daemon.system.retry import Retry
from daemon.workers.lane import Lane
from daemon.workers.slab import Slab
from stages.base import Reason, advise

log = structlog.get_logger()

FEED = 64  # jobs fetched, read and digested together
FINISH = 128  # jobs committed and published together
UNCONFIRMED = 32  # groups that may be published but not yet confirmed to be on the disk
SOLO_DEATHS = 2  # workers that must die on one image alone before it counts as the cause


@dataclass(frozen=True, slots=True)
class Published:
    """A group of jobs whose results are written to files, but perhaps not yet to the disk."""

    endings: list[Ending]
    ended: set[int]  # ids of those that no newer version has replaced
    publication: Publication


class Pipeline:
    """Takes every file of the inboxes to a result or a failure. It owns none of its parts; all of them are passed in."""

    def __init__(
        self,
        ledger: Ledger,
        watcher: Watcher,
        slab: Slab,
        lanes: Sequence[Lane],
        judge: Judge,
        destinations: Mapping[int, Destination],
        metrics: Metrics,
        *,
        outbox: Outbox | None = None,
        reuse_results: bool = True,
    ) -> None:
        self.ledger = ledger
        self.watcher = watcher
        self.slab = slab
        self.lanes = list(lanes)
        self.judge = judge
        self.destinations = destinations
        self.metrics = metrics
        self.reuse_results = reuse_results
        self.in_flight: dict[int, Job] = {}
        self.retry = Retry()
        self.outbox = outbox or Outbox()
        self.publisher = Publisher(ledger, destinations, self.outbox, self.retry, self.in_flight, metrics.counts.damaged)
        self._progressed_at = time.monotonic()
        self._roots = {inbox: destination.inbox for inbox, destination in destinations.items()}
        self.absences = Absences(self._roots)
        self._recovered: set[int] = set()  # inboxes
        self._ended: asyncio.Queue[Job] = asyncio.Queue(4 * FINISH)
        self._durable: asyncio.Queue[tuple[list[Ending], set[int]]] = asyncio.Queue(2)
        self._published: asyncio.Queue[Published] = asyncio.Queue(UNCONFIRMED)
        self._admitted = asyncio.Event()
        self._landed = asyncio.Event()
        self._watching = anyio.CancelScope()
        self._complete = False  # no more files will be admitted
        self.found_all = False  # every file that was there at the start, with `once`
        self.limit: Limit | None = None
        self._draining = False

    async def run(self, *, once: bool = False, limit: int = 0) -> None:
        """Work until drained. With `once`, stop when every file that is there is finished; with a limit, after that many."""
        self.limit = Limit(limit) if limit else None
        async with anyio.create_task_group() as tasks:
            for lane in self.lanes:
                tasks.start_soon(lane.run, self)
            for task in (self.finish, self.publish, self.confirm, self.publisher.release, self.outbox.run):
                tasks.start_soon(task)
            tasks.start_soon(self.watch, once)
            await self.feed()
            while self.in_flight:
                self._landed.clear()
                await self._landed.wait()
            await self.outbox.finish()
            tasks.cancel_scope.cancel()
        if once and not self._draining:
            await self.publisher.try_again()

    def held_back(self) -> list[str]:
        """Why some images wait while the others go on: inboxes that cannot be read, or sources that cannot be moved."""
        return self.watcher.held_back() + self.absences.held_back() + self.publisher.held_back()

    def drain(self) -> None:
        """Take no more images, and release those that wait for a worker. `run` returns when the rest is finished."""
        self._draining = self.retry.hurried = True
        self._watching.cancel()
        self._admitted.set()
        self.outbox.drain()
        for lane in self.lanes:
            for job in lane.empty():
                self._let_go(job)

    @property
    def progressed_at(self) -> float:
        """When a batch last began or ended, or an image was last finished. Monotonic seconds."""
        return max([self._progressed_at, *(lane.progressed_at for lane in self.lanes)])

    def wake(self) -> None:
        """There are jobs that `admit` has not seen: images to be retried, or to be annotated again."""
        self._admitted.set()

    async def recover(self, inboxes: set[int]) -> None:
        """Publish what the last daemon left in the ledger without publishing it, before anything else of the same inbox."""
        await self.publisher.publish_owed(inboxes)
        self._recovered |= inboxes

    # 1. A file appears and is complete.

    async def watch(self, once: bool) -> None:
        with self._watching:
            await self.watcher.run(self.admit, self.wake, once=once)
            self.found_all = True
        self._complete = True
        self._admitted.set()

    async def admit(self, files: list[File]) -> None:
        """Write a row for each new version. A backlog of a million files is a million rows, not a million objects in memory."""
        admitted = await self.retry("ledger", self.ledger.admit, files)
        self.metrics.admitted(admitted)
        if admitted.pending:
            self._admitted.set()

    # 2. Its bytes are read into the slab, once.

    async def feed(self) -> None:
        """Fetch jobs, reserve room in the slab, and read them: many at a time, but none waits for the room of another."""
        while jobs := await self._next_jobs():
            self.in_flight |= {job.id: job for job in jobs}
            group: list[Job] = []
            for job in jobs:
                if not self._reserve_now(job):
                    await self._take_up(group)
                    group = []
                    job.extent = await self.slab.reserve(job.version.size)
                group.append(job)
            await self._take_up(group)

    async def _next_jobs(self) -> list[Job]:
        """Wait for the next jobs; an empty list when there will be no more. Files of an inbox that does not answer are neither
        read nor moved."""
        while not self._draining:
            self._admitted.clear()
            complete, answering = self._complete, self.watcher.answering() - self.absences.resting()
            await self.recover(answering - self._recovered)
            lasting = self.absences.lasting() if complete else set()
            pause = await self.retry("ledger", self.ledger.seconds_to_next_try, lasting)
            if jobs := await self._next_of(answering, complete):
                return jobs
            nothing_waits = pause is None and not self.absences.resting() - lasting
            if complete and not self.in_flight and (nothing_waits or (self.limit and self.limit.is_over)):
                break
            with anyio.move_on_after(min(pause or 1.0, 1.0)):
                await self._admitted.wait()
        return []

    async def _next_of(self, inboxes: set[int], complete: bool) -> list[Job]:
        """The next jobs of these inboxes. With a limit there are none until all files are found, because the highest priority
        comes first; once enough have been taken, only their retries follow."""
        limit, busy = self.limit, self.in_flight.keys()
        if not limit:
            return await self.retry("ledger", self.ledger.next_jobs, FEED, busy, inboxes)
        if not complete or limit.is_over:
            return []
        only = None if limit.room else limit.postponed
        jobs = await self.retry("ledger", self.ledger.next_jobs, min(FEED, limit.room or FEED), busy, inboxes, only)
        limit.take(jobs)
        return jobs

    def _reserve_now(self, job: Job) -> bool:
        """Whether the job got room in the slab at once. A job that is larger than the slab fails."""
        job.fed_at = time.monotonic()
        if self.slab.fits(job.version.size):
            job.extent = self.slab.try_reserve(job.version.size)
            return job.extent is not None
        problem = f"{job.version.size} bytes are more than slab_bytes = {self.slab.size}"
        fix = f"{advise(f'slab_bytes = {job.version.size}')}; this much shared memory is reserved for images"
        job.failure = Failure(Reason.BYTES, f"{problem}. {fix}")
        return True

    async def _take_up(self, jobs: list[Job]) -> None:
        """Read and digest the files, take over results that the ledger already has, and queue the rest."""
        reserved = [job for job in jobs if job.extent]
        await self.retry.in_thread("inbox", read_files, reserved, self.slab, self._roots)
        self.absences.note(reserved)
        if self.reuse_results:
            await self.retry("ledger", self.ledger.recall, [job for job in jobs if job.digest])
        for job in jobs:
            self.metrics.fed(job)
            await self._pass_on(job)

    # 3. A worker runs it through the stages of a segment, in a batch with others: see daemon/workers/lane.py.

    async def try_again(self, lane: Lane, jobs: Sequence[Job], loss: WorkerLost) -> None:
        """A worker was lost with these images. If one of them may be the cause, each one runs alone."""
        for job in jobs:
            await self._queue(lane, job, suspect=loss.began)

    async def suspect(self, lane: Lane, job: Job, loss: WorkerLost) -> None:
        """A worker was lost that had only this image."""
        job.deaths += loss.began
        await self.retry("ledger", self.ledger.blame, job)
        if job.deaths < SOLO_DEATHS:
            await self._queue(lane, job, suspect=True)
            return
        reason = Reason.TIMEOUT if loss.timed_out else Reason.POISON
        job.failure = Failure(reason, f"{job.deaths} workers were lost on it alone: {loss.cause}")
        await self._pass_on(job)

    # 4. It goes on to the next segment, or it is finished.

    async def advance(self, lane: Lane, device: str, jobs: Sequence[Job], reply: Reply) -> None:
        """Take over a worker's reply."""
        self.metrics.replied(lane.name, device, reply)
        for job, outcome in zip(jobs, reply.outcomes, strict=True):
            job.format, job.width, job.height, job.pages = outcome.format, outcome.width, outcome.height, outcome.pages
            job.outputs |= outcome.outputs
            if outcome.reason:
                job.failure = Failure(Reason(outcome.reason), outcome.detail, outcome.transient)
        if onward := [job for job in jobs if self._next_lane(job)]:
            await self.retry("ledger", self.ledger.keep, onward)  # after a crash, work resumes at the next segment
        for job in jobs:
            await self._pass_on(job)

    async def _pass_on(self, job: Job) -> None:
        if lane := self._next_lane(job):
            await self._queue(lane, job, suspect=bool(job.deaths))
        else:
            self._leave_slab(job)
            await self._ended.put(job)

    async def _queue(self, lane: Lane, job: Job, *, suspect: bool) -> None:
        if self._draining:
            self._let_go(job)
        else:
            await lane.put(job, suspect=suspect)

    def _let_go(self, job: Job) -> None:
        """Forget a job. It stays PENDING for the next daemon."""
        self._leave_slab(job)
        del self.in_flight[job.id]
        self._landed.set()

    def _leave_slab(self, job: Job) -> None:
        if job.extent:
            self.slab.release(job.extent)
            job.extent = None

    def _next_lane(self, job: Job) -> Lane | None:
        """The first segment with a stage that the job still needs; None when the job has failed or its bin is decided."""
        if job.failure or job.gone or self.judge.is_decided(job):
            return None
        return next((lane for lane in self.lanes if lane.is_needed_by(job)), None)

    # 5. Its result is durable in the ledger, then published, then confirmed. results/outbox.py takes it on to the sinks.

    async def finish(self) -> None:
        """Decide how each job ends and commit that to the ledger. From here on its result is durable."""
        while True:
            jobs = [await self._ended.get(), *drain(self._ended, FINISH - 1)]
            endings = await to_thread.run_sync(self.judge.endings, jobs)
            ended = await self.retry("ledger", self.ledger.end, endings, self.judge.endings)
            await self._durable.put((endings, ended))

    async def publish(self) -> None:
        """Write sidecars, fill bins and move sources, in the order of the ledger. Replaced versions are not published."""
        while True:
            endings, ended = await self._durable.get()
            published = [e for e in endings if e.status in (JobStatus.DONE, JobStatus.FAILED) and e.job.id in ended]
            publication = await self.publisher.publish([self.ledger.record_of(ending) for ending in published])
            await self._published.put(Published(endings, ended, publication))

    async def confirm(self) -> None:
        """Mark as published only what would survive a power failure. Groups that arrived during one sync share the next."""
        while True:
            groups = [await self._published.get(), *drain(self._published)]
            await self.publisher.confirm([group.publication for group in groups])
            for group in groups:
                for ending in group.endings:
                    replaced = ending.status is not JobStatus.PENDING and ending.job.id not in group.ended
                    self._leave(ending, replaced=replaced)
            self._landed.set()
            self._admitted.set()

    def _leave(self, ending: Ending, *, replaced: bool) -> None:
        job = ending.job
        self._progressed_at = time.monotonic()
        del self.in_flight[job.id]
        if self.limit:
            self.limit.leave(ending)
        if replaced:
            return
        self.metrics.finished(ending)
        if ending.failure and not ending.failure.away:  # reported once for its whole inbox
            log.warning(
                "image failed" if ending.status is JobStatus.FAILED else "image not done",
                inbox=os.fsdecode(self._roots[job.inbox]),
                path=os.fsdecode(job.path),
                outcome=ending.status.name,
                reason=ending.failure.reason.value,
                detail=ending.failure.detail,
            )
