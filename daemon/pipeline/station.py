"""A station takes jobs from files on disk to published results, on the workers of its segments.

It asks the coordinator (daemon/pipeline/coordinator.py) for jobs, and reports to it everything that concerns the ledger.
A report is about a group of jobs, never about a single image that succeeded, because there is one coordinator
for all GPUs of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.abc
from anyio import to_thread

from daemon.errors import WorkerLost
from daemon.inbox.intake import read_files
from daemon.inbox.origin import origin_of
from daemon.jobs import Ending, Failure, Job, JobStatus
from daemon.ledger.record import Record
from daemon.messages import Reply
from daemon.monitoring.metrics import LookMetrics, Metrics
from daemon.monitoring.snapshot import LaneState, StationState
from daemon.pipeline.tracing import Tracer
from daemon.results.destinations import Destination, Publication, publish_records
from daemon.system.queues import drain
from daemon.system.retry import Retry
from daemon.workers.lane import Lane
from daemon.workers.slab import Slab
from stages.base import Reason, advise

REMOTE_GROUPS = 4  # of jobs that are read from stores at once, beside the files of folders
SILENT_SECONDS = 5.0  # after that a store whose groups are all waiting is away
FINISH = 128  # jobs committed and published together
SOLO_DEATHS = 2  # workers that must die on one image alone before it counts as the cause


@dataclass(frozen=True, slots=True)
class Published:
    """A group of jobs whose results are written to files, but perhaps not yet to the disk."""

    endings: list[Ending]
    ended: set[int]  # ids of those that no newer version has replaced
    publication: Publication
    confirmed: anyio.Event | None = None  # set when all of it is on the disk


def published_of(endings: Sequence[Ending], ended: set[int]) -> list[Ending]:
    """Those that are published. ended: as in `Published`."""
    return [e for e in endings if e.status in (JobStatus.DONE, JobStatus.FAILED) and e.job.id in ended]


class Coordinator(Protocol):
    """What a station needs to know and to report; the pipeline."""

    async def next_jobs(self, station: object) -> list[Job]:
        """Wait for the next jobs of this station; an empty list when there will be no more."""

    async def note_read(self, jobs: Sequence[Job]) -> None:
        """The files of these jobs were read, or could not be.
        Fill in the results that the ledger has for their bytes."""

    async def keep(self, jobs: Sequence[Job]) -> None:
        """Store the results of jobs that go on to another segment."""

    async def blame(self, job: Job) -> None:
        """Store how many workers died while they ran only this job."""

    async def end(self, endings: list[Ending]) -> set[int]:
        """Commit how jobs ended. Returns the ids of those that no newer version has replaced."""

    def records_of(self, endings: Sequence[Ending]) -> list[Record]:
        """What `end` has committed."""

    async def note_published(self, group: Published) -> None:
        """Results are written to files. Waits while too many groups are not confirmed yet."""

    def let_go(self, jobs: Sequence[Job]) -> None:
        """These jobs stay PENDING, for another station or the next daemon."""


class Judging(Protocol):
    """Decides how jobs end: results/judge.py."""

    def is_decided(self, job: Job) -> bool: ...
    def endings(self, jobs: Sequence[Job]) -> list[Ending]: ...


class Station:
    """Its parts are passed in; it owns none of them."""

    def __init__(
        self,
        slab: Slab,
        lanes: Sequence[Lane],
        judge: Judging,
        destinations: Mapping[int, Destination],
        metrics: Metrics | LookMetrics,
        publish: Callable[[Sequence[Record], Mapping[int, Destination]], Publication] | None = None,
        read: Callable[[Sequence[Job], Slab, Mapping[int, bytes]], None] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """publish: writes results to files; None: `publish_records`.
        read: brings the bytes of jobs into the slab; None: `read_files`. tracer: None if no image is traced."""
        self.slab = slab
        self.lanes = list(lanes)
        self.retry = Retry()
        self._judge = judge
        self._destinations = destinations
        self._roots = {inbox: destination.inbox for inbox, destination in destinations.items()}
        self._remote = {inbox for inbox, root in self._roots.items() if origin_of(root).is_remote}
        self._reading = anyio.Semaphore(REMOTE_GROUPS)
        self._metrics = metrics
        self._tracer = tracer
        self._write_results = publish or publish_records
        self._read = read or read_files
        self._ended: asyncio.Queue[Job] = asyncio.Queue(4 * FINISH)
        self._durable: asyncio.Queue[tuple[list[Ending], set[int]]] = asyncio.Queue(2)
        self._draining = False

    async def run(self, coordinator: Coordinator) -> None:
        """Work until cancelled."""
        self._coordinator = coordinator
        async with anyio.create_task_group() as tasks:
            for lane in self.lanes:
                tasks.start_soon(lane.run, self)
            tasks.start_soon(self._finish)
            tasks.start_soon(self._publish)
            await self._feed()

    def log_at(self, level: str) -> None:
        """The log of its process is the daemon's."""

    def drain(self, *, hurried: bool = True) -> None:
        """Let go of the jobs that wait for a worker; the coordinator hands out no more. hurried: wait for no disk
        either."""
        self._draining, self.retry.hurried = True, hurried
        for lane in self.lanes:
            self._empty_if_draining(lane)

    async def staff(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run the workers until `stop`. Reports as started when all have loaded their models.
        Raises NoWorkersLeft, ModelsUnusable."""
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as starting:
                for lane in self.lanes:
                    starting.start_soon(tasks.start, lane.pool.run)
            task_status.started()

    def stop(self) -> None:
        """No more batches will come: the workers end."""
        for lane in self.lanes:
            lane.pool.stop()

    def state(self) -> StationState:
        return StationState(
            lanes=[LaneState(lane.name, lane.queued(), lane.pool.health()) for lane in self.lanes],
            slab_used=self.slab.used,
            slab_size=self.slab.size,
            progressed_at=max(lane.progressed_at for lane in self.lanes),
            blocked=self.retry.blocked(),
        )

    def measure(self) -> None:
        """Update the gauges of the workers' memory."""
        for seat in [seat for lane in self.lanes for seat in lane.pool.seats]:
            if seat.worker and seat.worker.loaded:
                beat, name = seat.worker.beat, seat.setup.name
                self._metrics.worker_memory.labels(name).set(beat.resident_bytes)
                self._metrics.worker_gpu_memory.labels(name, "used").set(beat.device_used_bytes)
                self._metrics.worker_gpu_memory.labels(name, "peak").set(beat.device_peak_bytes)

    # 1. The bytes of jobs come into the slab, once.

    async def _feed(self) -> None:
        """Fetch jobs, reserve room in the slab, and read them, many at a time.
        Jobs that have room are read before one that must wait for it."""
        async with anyio.create_task_group() as reading:
            while jobs := await self._coordinator.next_jobs(self):
                group: list[Job] = []
                for job in jobs:
                    if not self._reserve_now(job):
                        await self._share_out(group, reading)
                        group = []
                        job.extent = await self.slab.reserve(job.version.size)
                    group.append(job)
                await self._share_out(group, reading)

    async def _share_out(self, jobs: list[Job], reading: anyio.abc.TaskGroup) -> None:
        """Take up the jobs. Those of a store are read beside the others, as it may answer late."""
        for inbox in {job.inbox for job in jobs} & self._remote:
            group = [job for job in jobs if job.inbox == inbox]
            if await self._find_room(inbox):
                reading.start_soon(self._take_up_remote, group)
            else:
                await self._give_back(inbox, group)
        await self._take_up([job for job in jobs if job.inbox not in self._remote])

    async def _find_room(self, inbox: int) -> bool:
        """Wait until a group of this inbox can be read beside the others. False if its store does not answer:
        other inboxes must not wait for it."""
        while True:
            with contextlib.suppress(anyio.WouldBlock):
                self._reading.acquire_nowait()
                return True
            if origin_of(self._roots[inbox]).silent_seconds() > SILENT_SECONDS:
                return False
            with anyio.move_on_after(1.0):
                await self._reading.acquire()
                return True

    async def _give_back(self, inbox: int, jobs: list[Job]) -> None:
        """Report these jobs as those of an inbox that is away: they wait, and no attempt is counted."""
        silent = origin_of(self._roots[inbox]).silent_seconds()
        why = f"the store has not answered for {silent:.0f} s"
        for job in jobs:
            job.failure = job.failure or Failure(Reason.UNREADABLE, why, transient=True, away=True)
        await self._note_read(jobs)

    async def _take_up_remote(self, jobs: list[Job]) -> None:
        try:
            await self._take_up(jobs)
        finally:
            self._reading.release()

    def _reserve_now(self, job: Job) -> bool:
        """Whether the job got room in the slab at once. A job that is larger than the slab fails."""
        job.fed_at = time.monotonic()
        if self.slab.fits(job.version.size):
            job.extent = self.slab.try_reserve(job.version.size)
            job.reserved = True
            return job.extent is not None
        problem = f"{job.version.size} bytes are more than slab_bytes = {self.slab.size}"
        fix = f"{advise(f'slab_bytes = {job.version.size}')}; this much shared memory is reserved for images"
        job.failure = Failure(Reason.BYTES, f"{problem}. {fix}")
        return True

    async def _take_up(self, jobs: list[Job]) -> None:
        """Read and digest the files, take over results that the ledger already has, and queue the rest."""
        if not jobs:
            return
        await self.retry.in_thread(
            "inbox", self._read, [job for job in jobs if job.extent], self.slab, self._roots
        )
        await self._note_read(jobs)

    async def _note_read(self, jobs: list[Job]) -> None:
        await self._coordinator.note_read(jobs)
        if self._tracer:
            self._tracer.read(jobs)
        for job in jobs:
            self._metrics.fed(job)
            await self._pass_on(job)

    # 2. A worker runs each job through the stages of a segment,
    # in a batch with others: see daemon/workers/lane.py.

    def begin(self, jobs: Sequence[Job]) -> None:
        """A worker gets these as a batch."""
        if self._tracer:
            self._tracer.sent(jobs)

    async def try_again(self, lane: Lane, jobs: Sequence[Job], loss: WorkerLost) -> None:
        """A worker was lost with these images. If one of them may be the cause, each one runs alone."""
        if self._tracer:
            self._tracer.lost(jobs, loss.cause)
        for job in jobs:
            await self._queue(lane, job, suspect=loss.began)

    async def suspect(self, lane: Lane, job: Job, loss: WorkerLost) -> None:
        """A worker was lost while it had only this image."""
        if self._tracer:
            self._tracer.lost([job], loss.cause)
        job.deaths += loss.began
        await self._coordinator.blame(job)
        if job.deaths < SOLO_DEATHS:
            await self._queue(lane, job, suspect=True)
            return
        reason = Reason.TIMEOUT if loss.timed_out else Reason.POISON
        job.failure = Failure(
            reason, f"{job.deaths} workers died while they ran only this image: {loss.cause}"
        )
        await self._pass_on(job)

    async def advance(self, lane: Lane, device: str, jobs: Sequence[Job], reply: Reply) -> None:
        """Take over a worker's reply."""
        self._metrics.replied(lane.name, device, reply)
        if self._tracer:
            self._tracer.answered(lane.name, device, jobs, reply)
        for job, outcome in zip(jobs, reply.outcomes, strict=True):
            job.format, job.pages = outcome.format, outcome.pages
            job.width, job.height = outcome.width, outcome.height
            job.outputs |= outcome.outputs
            if outcome.reason:
                job.failure = Failure(Reason(outcome.reason), outcome.detail, outcome.transient)
        if len(self.lanes) > 1 and (onward := [job for job in jobs if self._next_lane(job)]):
            await self._coordinator.keep(onward)  # after a crash, work resumes at the next segment
        for job in jobs:
            await self._pass_on(job)

    # 3. It goes on to the next segment, or it is finished.

    async def _pass_on(self, job: Job) -> None:
        if lane := self._next_lane(job):
            await self._queue(lane, job, suspect=bool(job.deaths))
        else:
            self._leave_slab(job)
            await self._ended.put(job)

    async def _queue(self, lane: Lane, job: Job, *, suspect: bool) -> None:
        if self._draining:
            self._let_go(job)
            return
        await lane.put(job, suspect=suspect)
        self._empty_if_draining(lane)  # a drain may have begun while the job waited for room in the queue

    def _empty_if_draining(self, lane: Lane) -> None:
        if self._draining:
            for job in lane.empty():
                self._let_go(job)

    def _let_go(self, job: Job) -> None:
        self._leave_slab(job)
        if self._tracer:
            self._tracer.forget([job])
        self._coordinator.let_go([job])

    def _leave_slab(self, job: Job) -> None:
        if job.extent:
            self.slab.release(job.extent)
            job.extent = None

    def _next_lane(self, job: Job) -> Lane | None:
        """The first segment with a stage that the job still needs;
        None when the job has failed or its bin is decided."""
        if job.failure or job.gone or self._judge.is_decided(job):
            return None
        return next((lane for lane in self.lanes if lane.is_needed_by(job)), None)

    # 4. Its result is durable in the ledger, then published.

    async def _finish(self) -> None:
        """Decide how each job ends and commit that to the ledger. From here on its result is durable."""
        while True:
            jobs = [await self._ended.get(), *drain(self._ended, FINISH - 1)]
            endings = await to_thread.run_sync(self._judge.endings, jobs)
            if self._tracer:
                self._tracer.pass_on("judge", jobs)
            ended = await self._coordinator.end(endings)
            if self._tracer:
                self._tracer.pass_on("commit", jobs)
            await self._durable.put((endings, ended))

    async def _publish(self) -> None:
        """Write sidecars, fill bins and move sources, in the order of the ledger.
        Replaced versions are not published."""
        while True:
            endings, ended = await self._durable.get()
            records = self._coordinator.records_of(published_of(endings, ended))
            publication = await self.retry.in_thread(
                "results", self._write_results, records, self._destinations
            )
            if self._tracer:
                self._tracer.publish(endings)
            await self._coordinator.note_published(Published(endings, ended, publication))
