"""READ THIS FIRST. The life of an image, a method a step, in the order it happens:

    watch → admit → feed → dispatch → work → advance → finish → publish → confirm

Every arrow is bounded: `feed` waits for room in the slab, each segment's queue is short, a batch is formed only when a
worker has a slot free. So the slowest GPU holds back the folder, and memory stays flat however many files wait.
A job is PENDING in the ledger until `finish`; whatever a crash interrupts is simply done again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
from daemon.messages import Item, Reply
from daemon.monitoring.metrics import Metrics
from daemon.results.destinations import Destination, Publication
from daemon.results.judge import Judge
from daemon.results.outbox import Outbox
from daemon.results.publisher import Publisher
from daemon.system.retry import Retry
from daemon.workers.pool import Pool
from daemon.workers.slab import Slab
from daemon.workers.worker import Worker
from stages.base import Reason, advise

log = structlog.get_logger()

FEED = 64  # jobs fetched, read and digested together
FINISH = 128  # jobs committed and published together
UNCONFIRMED = 32  # groups of them that may be published and not yet known to be on the disk
SOLO_DEATHS = 2  # workers that may die on an image alone before it is held to be the cause


@dataclass(slots=True)
class Lane:
    """A segment at work: its stages, its queue, its workers, and the images suspected of having killed one."""

    name: str
    stages: tuple[str, ...]
    batch_size: int
    pool: Pool
    queue: asyncio.Queue[Job]
    # Never more than is in flight. The last comes first, so that each is settled before the next one's turn.
    suspects: asyncio.Queue[Job] = field(default_factory=asyncio.LifoQueue)

    def is_needed_by(self, job: Job) -> bool:
        return any(stage not in job.outputs for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Published:
    """A group of jobs whose results stand in their files, though perhaps not yet on the disk."""

    endings: list[Ending]
    ended: set[int]  # the ids among them that nothing has replaced meanwhile
    publication: Publication


class Pipeline:
    """Takes every file of the inboxes to its end. All its parts are handed in; it owns none of them."""

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
        self.publisher = Publisher(ledger, destinations, self.outbox, self.retry, self.in_flight, metrics.put_back)
        self.progressed_at = time.monotonic()
        self._roots = {inbox: destination.inbox for inbox, destination in destinations.items()}
        self.absences = Absences(self._roots)
        self._recovered: set[int] = set()  # inboxes
        self._ended: asyncio.Queue[Job] = asyncio.Queue(4 * FINISH)
        self._durable: asyncio.Queue[tuple[list[Ending], set[int]]] = asyncio.Queue(2)
        self._published: asyncio.Queue[Published] = asyncio.Queue(UNCONFIRMED)
        self._admitted = asyncio.Event()
        self._landed = asyncio.Event()
        self._watching = anyio.CancelScope()
        self._complete = False  # nothing more will be admitted
        self.found_all = False  # that was there, with `once`
        self.limit: Limit | None = None
        self._draining = False

    async def run(self, *, once: bool = False, limit: int = 0) -> None:
        """Work until drained or, with `once`, until all that was there has its end; with a limit, until so many images have."""
        self.limit = Limit(limit) if limit else None
        async with anyio.create_task_group() as tasks:
            for lane in self.lanes:
                tasks.start_soon(self.dispatch, lane)
                tasks.start_soon(self.isolate, lane)
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
        """What cannot be done at present while all else goes on: inboxes that cannot be read, or that no source can leave."""
        return self.watcher.held_back() + self.absences.held_back() + self.publisher.held_back()

    def drain(self) -> None:
        """Take in nothing more, and let go of what waits for a worker; `run` returns when the rest has its end."""
        self._draining = self.retry.hurried = True
        self._watching.cancel()
        self._admitted.set()
        self.outbox.drain()
        for queue in [queue for lane in self.lanes for queue in (lane.queue, lane.suspects)]:
            while not queue.empty():
                self._let_go(queue.get_nowait())

    def wake(self) -> None:
        """There are jobs that nobody admitted: images to be tried again, or annotated anew."""
        self._admitted.set()

    async def recover(self, inboxes: set[int]) -> None:
        """What was durable but not yet published when the last daemon ended is published before anything else of its inbox."""
        await self.publisher.publish_owed(inboxes)
        self._recovered |= inboxes

    # 1. A file appears, and is whole.

    async def watch(self, once: bool) -> None:
        self.watcher.heard_of = self.wake
        with self._watching:
            await self.watcher.run(self.admit, once=once)
            self.found_all = True
        self._complete = True
        self._admitted.set()

    async def admit(self, files: list[File]) -> None:
        """A row for each new version. A backlog of a million files is a million rows, not a million objects here."""
        admitted = await self.retry("ledger", self.ledger.admit, files)
        self.metrics.admitted(admitted)
        if admitted.pending:
            self._admitted.set()

    # 2. Its bytes come into the slab, once.

    async def feed(self) -> None:
        """Fetch jobs, give each room in the slab, and take them up: many at a time, but none held back while another
        waits for room."""
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
        """The next jobs, waiting until there are some; none when there will be no more. Of an inbox that does not answer,
        nothing is read and nothing moved."""
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
        """The next jobs of these inboxes. With a limit there are none before all files are found, as the highest priority comes
        first; and when enough have been taken up, only those of them that are to be tried again."""
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
        """Whether the job need not wait for room in the slab; one that can never have it fails."""
        job.fed_at = time.monotonic()
        if self.slab.fits(job.version.size):
            job.extent = self.slab.try_reserve(job.version.size)
            return job.extent is not None
        told = f"{job.version.size} bytes are more than slab_bytes = {self.slab.size}"
        how = f"{advise(f'slab_bytes = {job.version.size}')}; this much shared memory is reserved for images"
        job.failure = Failure(Reason.BYTES, f"{told}. {how}")
        return True

    async def _take_up(self, jobs: list[Job]) -> None:
        """Read and digest the files, answer from the ledger what is known there, queue the rest."""
        reserved = [job for job in jobs if job.extent]
        await self.retry.in_thread("inbox", read_files, reserved, self.slab, self._roots)
        self.absences.note(reserved)
        if self.reuse_results:
            await self.retry("ledger", self.ledger.recall, [job for job in jobs if job.digest])
        for job in jobs:
            self.metrics.fed(job)
            await self._pass_on(job)

    # 3. Its batch is formed when a worker has a slot free: as late, and so as full, as possible.

    async def dispatch(self, lane: Lane) -> None:
        async with anyio.create_task_group() as batches:
            while True:
                jobs = [await lane.queue.get()]
                worker = await lane.pool.reserve()
                while len(jobs) < lane.batch_size and not lane.queue.empty():
                    jobs.append(lane.queue.get_nowait())
                batches.start_soon(self.work, lane, worker, jobs)

    # 4. A worker takes it through the stages of this segment.

    async def work(self, lane: Lane, worker: Worker, jobs: list[Job]) -> None:
        try:
            reply = await self._run(lane, worker, jobs)
        except WorkerLost as loss:
            for job in jobs:
                await self._queue(lane.suspects if loss.began else lane.queue, job)
        else:
            await self.advance(lane, worker, jobs, reply)
        finally:
            lane.pool.release(worker)

    async def isolate(self, lane: Lane) -> None:
        """A worker died on these images: each is tried on a worker that does nothing else, so that only the culprit pays."""
        while True:
            job = await lane.suspects.get()
            async with lane.pool.reserve_whole() as worker:
                try:
                    reply = await self._run(lane, worker, [job])
                except WorkerLost as loss:
                    await self._suspect(lane, job, loss)
                else:
                    await self.advance(lane, worker, [job], reply)

    async def _suspect(self, lane: Lane, job: Job, loss: WorkerLost) -> None:
        job.deaths += loss.began
        await self.retry("ledger", self.ledger.blame, job)
        if job.deaths < SOLO_DEATHS:
            await self._queue(lane.suspects, job)
            return
        reason = Reason.TIMEOUT if loss.timed_out else Reason.POISON
        job.failure = Failure(reason, f"{job.deaths} workers were lost on it alone: {loss.cause}")
        await self._pass_on(job)

    async def _run(self, lane: Lane, worker: Worker, jobs: Sequence[Job]) -> Reply:
        """A batch's begin and its end, good or bad, both are progress: what lies between them the pool bounds."""
        self.progressed_at = time.monotonic()
        try:
            return await lane.pool.run_batch(worker, [self._item(lane, job) for job in jobs])
        finally:
            self.progressed_at = time.monotonic()

    def _item(self, lane: Lane, job: Job) -> Item:
        assert job.extent is not None
        return Item(*job.extent, {stage: output.payload for stage, output in job.outputs.items()})

    # 5. On to the next segment, or to its end.

    async def advance(self, lane: Lane, worker: Worker, jobs: Sequence[Job], reply: Reply) -> None:
        self.metrics.replied(lane.name, worker.device, reply)
        for job, outcome in zip(jobs, reply.outcomes, strict=True):
            job.format, job.width, job.height, job.pages = outcome.format, outcome.width, outcome.height, outcome.pages
            job.outputs |= outcome.outputs
            if outcome.reason:
                job.failure = Failure(Reason(outcome.reason), outcome.detail, outcome.transient)
        if onward := [job for job in jobs if self._next_lane(job)]:
            await self.retry("ledger", self.ledger.keep, onward)  # a crash resumes at the next segment
        for job in jobs:
            await self._pass_on(job)

    async def _pass_on(self, job: Job) -> None:
        if lane := self._next_lane(job):
            await self._queue(lane.suspects if job.deaths else lane.queue, job)
        else:
            self._leave_slab(job)
            await self._ended.put(job)

    async def _queue(self, queue: asyncio.Queue[Job], job: Job) -> None:
        if self._draining:
            self._let_go(job)
        else:
            await queue.put(job)

    def _let_go(self, job: Job) -> None:
        """It stays PENDING, for the next daemon."""
        self._leave_slab(job)
        del self.in_flight[job.id]
        self._landed.set()

    def _leave_slab(self, job: Job) -> None:
        if job.extent:
            self.slab.release(job.extent)
            job.extent = None

    def _next_lane(self, job: Job) -> Lane | None:
        """The first segment with a stage the job still needs; none when it has failed or its bin is decided."""
        if job.failure or job.gone or self.judge.is_decided(job):
            return None
        return next((lane for lane in self.lanes if lane.is_needed_by(job)), None)

    # 6. Durable, then published, then known to be so. From there results/outbox.py takes it to the sinks.

    async def finish(self) -> None:
        """How each job ends, and that in the ledger: from here on its result is durable."""
        while True:
            jobs = [await self._ended.get()]
            while len(jobs) < FINISH and not self._ended.empty():
                jobs.append(self._ended.get_nowait())
            endings = await to_thread.run_sync(self.judge.endings, jobs)
            ended = await self.retry("ledger", self.ledger.end, endings, self.judge.endings)
            await self._durable.put((endings, ended))

    async def publish(self) -> None:
        """Sidecars, bins and sources follow the ledger, in its order; what was replaced meanwhile is not published."""
        while True:
            endings, ended = await self._durable.get()
            published = [e for e in endings if e.status in (JobStatus.DONE, JobStatus.FAILED) and e.job.id in ended]
            publication = await self.publisher.publish([self.ledger.record_of(ending) for ending in published])
            await self._published.put(Published(endings, ended, publication))

    async def confirm(self) -> None:
        """Only what would outlive a power failure is marked as published: all groups that came while the disk was busy
        with the last ones share its next effort."""
        while True:
            groups = [await self._published.get()]
            while not self._published.empty():
                groups.append(self._published.get_nowait())
            await self.publisher.confirm([group.publication for group in groups])
            for group in groups:
                for ending in group.endings:
                    replaced = ending.status is not JobStatus.PENDING and ending.job.id not in group.ended
                    self._leave(ending, replaced=replaced)
            self._landed.set()
            self._admitted.set()

    def _leave(self, ending: Ending, *, replaced: bool) -> None:
        job = ending.job
        self.progressed_at = time.monotonic()
        del self.in_flight[job.id]
        if self.limit:
            self.limit.leave(ending)
        if replaced:
            return
        self.metrics.ended(ending)
        if ending.failure and not ending.failure.away:  # which is said once of all
            log.warning(
                "image failed" if ending.status is JobStatus.FAILED else "image not done",
                inbox=os.fsdecode(self._roots[job.inbox]),
                path=os.fsdecode(job.path),
                outcome=ending.status.name,
                reason=ending.failure.reason.value,
                detail=ending.failure.detail,
            )
