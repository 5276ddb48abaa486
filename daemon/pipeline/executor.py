"""An executor takes jobs from files on disk to published results, on the workers of its segments.

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
from msgspec.structs import replace

from daemon.core.errors import WorkerLost
from daemon.core.jobs import UNREAD, Attempt, Content, Ending, Extent, Failure, Job, Read
from daemon.core.messages import Beat, Reply
from daemon.core.slab import Slab
from daemon.inbox.origin import origin_of
from daemon.ledger.record import Committed, Record
from daemon.monitoring.metrics import LookMetrics, Metrics
from daemon.monitoring.snapshot import ExecutorState
from daemon.pipeline.tracing import Tracer
from daemon.results.destinations import Destination, Publication, publish_records
from daemon.system.retry import Retry
from daemon.workers.batcher import Batcher, drain
from stages.contract.base import PREPARATIONS, Reason, advise
from stages.registry.registry import sort_stages

REMOTE_GROUPS = 4  # of jobs that are read from stores at once, beside the files of folders
SILENT_SECONDS = 5.0  # after that a store whose groups are all waiting is away
FINISH = 128  # jobs committed and published together
SOLO_DEATHS = 2  # workers that must die on one image alone before it counts as the cause


@dataclass(frozen=True, slots=True)
class Published:
    """A group of jobs whose results are written to files, but perhaps not yet to the disk."""

    endings: list[Ending]
    newest: set[int]  # ids of those that no newer version has replaced
    publication: Publication
    confirmed: anyio.Event | None = None  # set when all of it is on the disk


class JobSource(Protocol):
    """What an executor needs to know and to report; the pipeline."""

    async def next_jobs(self, executor: object) -> list[Job]:
        """Wait for the next jobs of this executor; an empty list when there will be no more."""

    async def note_read(self, read: Mapping[int, Read]) -> Mapping[int, Content | None]:
        """The files of these images were read, or could not be. Returns what the ledger knows about their bytes; None: they
        are not those of the image any more."""

    async def keep(self, contents: Sequence[Content]) -> None:
        """Store the results of images that go on to another segment."""

    async def blame(self, image: int, deaths: int) -> None:
        """Store how many workers died while they ran only this image."""

    async def end(self, endings: Sequence[Ending]) -> Committed:
        """Commit how jobs ended."""

    async def note_published(self, group: Published) -> None:
        """Results are written to files. Waits while too many groups are not confirmed yet."""

    def let_go(self, images: Sequence[int]) -> None:
        """These images stay PENDING, for another executor or the next daemon."""


class Judging(Protocol):
    """Decides how jobs end: results/judge.py."""

    def is_decided(self, content: Content) -> bool: ...
    def endings(self, attempts: Sequence[Attempt]) -> list[Ending]: ...


class Executor:
    """Its parts are passed in; it owns none of them."""

    def __init__(
        self,
        slab: Slab,
        batchers: Sequence[Batcher],
        judge: Judging,
        destinations: Mapping[int, Destination],
        metrics: Metrics | LookMetrics,
        publish: Callable[[Sequence[Record], Mapping[int, Destination]], Publication] | None = None,
        read: Callable[[Sequence[tuple[Job, Extent]], Slab], dict[int, Read]] | None = None,
        tracer: Tracer | None = None,
        beside: Retry | None = None,
    ) -> None:
        """publish: writes results to files; None: `publish_records`.
        read: as `Origin.read`; None: of the origin of each inbox. tracer: None if no image is traced. beside: that of the
        coordinator, if it is in this process."""
        self.slab = slab
        self.batchers = list(batchers)
        self.retry = Retry(beside)
        self._judge = judge
        self._destinations = destinations
        self._origins = {inbox: origin_of(destination.inbox) for inbox, destination in destinations.items()}
        self._remote = {inbox for inbox, origin in self._origins.items() if origin.is_remote}
        self._reading = anyio.Semaphore(REMOTE_GROUPS)
        self._metrics = metrics
        self._tracer = tracer
        self._write_results = publish or publish_records
        self._read = read or self._read_files
        self._ended: asyncio.Queue[Attempt] = asyncio.Queue(4 * FINISH)
        self._durable: asyncio.Queue[Committed] = asyncio.Queue(2)
        self._draining = anyio.Event()

    async def run(self, coordinator: JobSource) -> None:
        """Work until cancelled."""
        self._coordinator = coordinator
        async with anyio.create_task_group() as tasks:
            for batcher in self.batchers:
                tasks.start_soon(batcher.run, self)
            tasks.start_soon(self._finish)
            tasks.start_soon(self._publish)
            await self._feed()

    def log_at(self, level: str) -> None:
        """The log of its process is the daemon's."""

    def drain(self) -> None:
        """Let go of the jobs that wait for a worker, and wait for no disk; the coordinator hands out no more."""
        self._draining.set()
        self.retry.hurried = True
        for batcher in self.batchers:
            self._empty(batcher)

    async def staff(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run the workers until `stop`. Reports as started when all have loaded their models.
        Raises NoWorkersLeft, ModelsUnusable."""
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as starting:
                for batcher in self.batchers:
                    starting.start_soon(tasks.start, batcher.pool.run)
            task_status.started()

    def stop(self) -> None:
        """No more batches will come: the workers end."""
        for batcher in self.batchers:
            batcher.pool.stop()

    def state(self) -> ExecutorState:
        return ExecutorState(
            batchers=[batcher.state() for batcher in self.batchers],
            slab_used=self.slab.used,
            slab_size=self.slab.size,
            progressed_at=max(batcher.pool.progressed_at for batcher in self.batchers),
            blocked=self.retry.blocked(),
            waits_for_room=self.slab.is_awaited,
            is_backed_up=self._ended.full(),
        )

    def measure(self) -> None:
        """Update the gauges of the workers."""
        for slot in [slot for batcher in self.batchers for slot in batcher.pool.slots]:
            name = slot.setup.name
            beat = slot.worker.beat if slot.worker else Beat(0)
            for spec in slot.setup.stages:
                self._metrics.suspicious.labels(name, spec.name).set(spec.name in beat.suspicious)
            if slot.worker and slot.worker.loaded:
                self._metrics.worker_memory.labels(name).set(beat.resident_bytes)
                self._metrics.worker_gpu_memory.labels(name, "used").set(beat.device_used_bytes)
                self._metrics.worker_gpu_memory.labels(name, "peak").set(beat.device_peak_bytes)
                for kind in PREPARATIONS:
                    self._metrics.worker_preparations.labels(name, kind).set(beat.prepared.get(kind, 0))
                if looked_at := slot.worker.looked_at:
                    self._metrics.canary_success.labels(name).set(looked_at)

    # 1. The bytes of jobs come into the slab, once.

    async def _feed(self) -> None:
        """Fetch jobs, reserve room in the slab, and read them, many at a time.
        Jobs that have room are read before one that must wait for it."""
        async with anyio.create_task_group() as reading:
            while jobs := await self._coordinator.next_jobs(self):
                group: list[Attempt] = []
                for job in jobs:
                    attempt = Attempt(job, began_at=time.monotonic())
                    size = job.version.size
                    if size > self.slab.size:
                        attempt.failure = self._describe_too_large(size)
                    elif (extent := self.slab.try_reserve(size)) is None:
                        await self._read_all(group, reading)
                        group = []
                        attempt.extent = await self.slab.reserve(size)
                    else:
                        attempt.extent = extent
                    group.append(attempt)
                await self._read_all(group, reading)

    def _describe_too_large(self, size: int) -> Failure:
        problem = f"{size} bytes are more than slab_bytes = {self.slab.size}"
        fix = f"{advise(f'slab_bytes = {size}')}; this much shared memory is reserved for images"
        return Failure(Reason.BYTES, f"{problem}. {fix}")

    async def _read_all(self, attempts: list[Attempt], reading: anyio.abc.TaskGroup) -> None:
        """Read the files of these jobs. Those of a store are read beside the others, as it may answer late."""
        for inbox in {attempt.job.inbox for attempt in attempts} & self._remote:
            group = [attempt for attempt in attempts if attempt.job.inbox == inbox]
            if await self._find_room(inbox):
                reading.start_soon(self._read_remote, group)
            else:
                await self._give_back(inbox, group)
        await self._read_group([attempt for attempt in attempts if attempt.job.inbox not in self._remote])

    async def _find_room(self, inbox: int) -> bool:
        """Wait until a group of this inbox can be read beside the others. False if its store does not answer:
        other inboxes must not wait for it."""
        while True:
            with contextlib.suppress(anyio.WouldBlock):
                self._reading.acquire_nowait()
                return True
            if self._origins[inbox].silent_seconds() > SILENT_SECONDS:
                return False
            with anyio.move_on_after(1.0):
                await self._reading.acquire()
                return True

    async def _give_back(self, inbox: int, attempts: list[Attempt]) -> None:
        """Report these as those of an inbox that is away: they wait, and no attempt is counted."""
        silent = self._origins[inbox].silent_seconds()
        why = f"the store has not answered for {silent:.0f} s"
        for attempt in attempts:
            attempt.failure = attempt.failure or Failure(Reason.UNREADABLE, why, transient=True, away=True)
        await self._reuse_known(attempts, {})

    async def _read_remote(self, attempts: list[Attempt]) -> None:
        try:
            await self._read_group(attempts)
        finally:
            self._reading.release()

    async def _read_group(self, attempts: list[Attempt]) -> None:
        """Read and digest the files."""
        if not attempts:
            return
        wanted = [(attempt.job, attempt.extent) for attempt in attempts if attempt.extent]
        await self._reuse_known(attempts, await self.retry.in_thread("inbox", self._read, wanted, self.slab))

    def _read_files(self, jobs: Sequence[tuple[Job, Extent]], slab: Slab) -> dict[int, Read]:
        """Each from the origin of its inbox. Runs in a thread. Raises OSError, as `Origin.read`."""
        read: dict[int, Read] = {}
        for inbox in {job.inbox for job, _ in jobs}:
            read |= self._origins[inbox].read([each for each in jobs if each[0].inbox == inbox], slab)
        return read

    async def _reuse_known(self, attempts: list[Attempt], found: Mapping[int, Read]) -> None:
        """Take over results that the ledger already has, and queue the rest. found: of those that were read."""
        read = {a.job.id: found.get(a.job.id) or Read(failure=a.failure) for a in attempts}
        known = await self._coordinator.note_read(read)
        for attempt in attempts:
            said = read[attempt.job.id]
            content = known.get(attempt.job.id, Content(said.digest))
            attempt.content, attempt.failure = content or UNREAD, said.failure
            attempt.gone = said.gone or content is None
        if self._tracer:
            self._tracer.read(attempts)
        for attempt in attempts:
            self._metrics.fed(attempt)
            await self._route(attempt)

    # 2. A worker runs each job through the stages of a segment,
    # in a batch with others: see daemon/workers/batcher.py.

    async def try_again(self, batcher: Batcher, attempts: Sequence[Attempt], loss: WorkerLost) -> None:
        """A worker was lost with these images. If one of them may be the cause, each one runs alone."""
        if self._tracer:
            self._tracer.lost(attempts, loss.cause)
        for attempt in attempts:
            await self._queue(batcher, attempt, suspect=loss.began)

    async def suspect(self, batcher: Batcher, attempt: Attempt, loss: WorkerLost) -> None:
        """A worker was lost while it had only this image."""
        if self._tracer:
            self._tracer.lost([attempt], loss.cause)
        deaths = attempt.job.deaths + loss.began
        attempt.job = replace(attempt.job, deaths=deaths)
        await self._coordinator.blame(attempt.job.id, deaths)
        if deaths < SOLO_DEATHS:
            await self._queue(batcher, attempt, suspect=True)
            return
        reason = Reason.TIMEOUT if loss.timed_out else Reason.POISON
        attempt.failure = Failure(
            reason, f"{deaths} workers died while they ran only this image: {loss.cause}"
        )
        await self._route(attempt)

    async def advance(self, batcher: Batcher, device: str, attempts: Sequence[Attempt], reply: Reply) -> None:
        """Take over a worker's reply."""
        self._metrics.replied(batcher.name, device, reply)
        if self._tracer:
            self._tracer.answered(batcher.name, device, attempts, reply)
        for attempt, said in zip(attempts, reply.outcomes, strict=True):
            outputs = attempt.content.outputs | said.outputs
            if attempt.content.outputs:  # in the order of the stages, as the sidecar has them
                outputs = {stage: outputs[stage] for stage in sort_stages(outputs)}
            picture = (said.format, said.width, said.height, said.pages)
            attempt.content = Content(attempt.content.digest, *picture, outputs)
            if said.reason:
                attempt.failure = Failure(Reason(said.reason), said.detail, said.transient)
        onward = (
            [each.content for each in attempts if self._next_batcher(each)] if len(self.batchers) > 1 else []
        )
        if onward:  # after a crash, work resumes at the next segment
            await self._coordinator.keep(onward)
        for attempt in attempts:
            await self._route(attempt)

    # 3. It goes on to the next segment, or it is finished.

    async def _route(self, attempt: Attempt) -> None:
        if batcher := self._next_batcher(attempt):
            await self._queue(batcher, attempt, suspect=bool(attempt.job.deaths))
        else:
            self._leave_slab(attempt)
            await self._ended.put(attempt)

    def _next_batcher(self, attempt: Attempt) -> Batcher | None:
        """The first segment with a stage that the job still needs;
        None when the job has failed or its bin is decided."""
        if attempt.failure or attempt.gone or self._judge.is_decided(attempt.content):
            return None
        had = attempt.content.outputs
        return next(
            (batcher for batcher in self.batchers if any(stage not in had for stage in batcher.stages)), None
        )

    async def _queue(self, batcher: Batcher, attempt: Attempt, *, suspect: bool) -> None:
        if self._draining.is_set():
            self._let_go(attempt)
            return
        await batcher.put(attempt, suspect=suspect)
        if self._draining.is_set():  # since it waits for room in the queue
            self._empty(batcher)

    def _empty(self, batcher: Batcher) -> None:
        for attempt in batcher.empty():
            self._let_go(attempt)

    def _let_go(self, attempt: Attempt) -> None:
        self._leave_slab(attempt)
        if self._tracer:
            self._tracer.forget([attempt])
        self._coordinator.let_go([attempt.job.id])

    def _leave_slab(self, attempt: Attempt) -> None:
        if attempt.extent:
            self.slab.release(attempt.extent)
            attempt.extent = None

    # 4. Its result is durable in the ledger, then published.

    async def _finish(self) -> None:
        """Decide how each job ends and commit that to the ledger. From here on its result is durable."""
        while True:
            attempts = [await self._ended.get(), *drain(self._ended, FINISH - 1)]
            endings = await to_thread.run_sync(self._judge.endings, attempts)
            if self._tracer:
                self._tracer.pass_on("judge", attempts)
            committed = await self._coordinator.end(endings)
            if self._tracer:
                self._tracer.pass_on("commit", attempts)
            await self._durable.put(committed)

    async def _publish(self) -> None:
        """Write sidecars, fill bins and move sources, in the order of the ledger.
        Replaced versions are not published."""
        while True:
            committed = await self._durable.get()
            publication = await self.retry.in_thread(
                "results", self._write_results, committed.published(), self._destinations
            )
            if self._tracer:
                self._tracer.publish(committed.endings)
            published = Published(committed.endings, committed.newest, publication)
            await self._coordinator.note_published(published)
