"""Read this first: the life of an image, step by step. The coordinator, here, watches the inboxes, owns the
ledger and hands out jobs; schedule.py knows who has which. An executor (executor.py) does the work on each image.

    here 1     watch, admit   a file is complete (inbox/watcher.py), or was in another (unpacking/): it gets a row
    here 2     next_jobs      an executor asks for jobs
    executor 1 _feed          their bytes come into shared memory, known results from the ledger
    executor 2 advance        after a batch (Batcher.run in workers/batcher.py) has run through the stages of a worker
    executor 3 _route         to the next segment, or to the end
    executor 4 _finish        the result is committed (here 3: end): from now on it is durable
    executor 4 _publish       sidecar, bin and source: results/destinations.py
    here 4     confirm        all of that is on the disk; results/outbox.py takes it on to the sinks

A worker dies:           Worker.abandon, Batcher._work, Executor.try_again; of one image: Batcher._isolate, Executor.suspect
A disk is full or fails: the call is repeated until it succeeds (system/retry.py): Ledger.insist, Executor._publish

Every step is bounded: an executor asks for jobs when it has room for their bytes, and forms a batch only when a
worker has a free thread. So the slowest GPU limits how fast files are read, and the number of files costs no
memory. A job is PENDING in the ledger until its executor has finished it; what a crash interrupts is done again.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import anyio
import structlog

from daemon.core.jobs import Content, Ending, File, Job, JobStatus, Read
from daemon.inbox.watcher import Watcher
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Committed
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import ExecutorState
from daemon.pipeline.executor import Executor, Published
from daemon.pipeline.remote import RemoteExecutor
from daemon.pipeline.running import RunningLook, finish_looks
from daemon.pipeline.schedule import Entry, Schedule
from daemon.pipeline.unpacker import Unpacker
from daemon.results.destinations import Destination
from daemon.results.judge import Judge, log_failures
from daemon.results.outbox import Outbox
from daemon.results.publisher import Publisher
from daemon.system.retry import Retry

log = structlog.get_logger()

FEED = 64  # jobs fetched, read and digested together
UNCONFIRMED = 32  # groups that may be published but not yet confirmed to be on the disk


class Pipeline:
    """Takes every file of the inboxes to a result or a failure. Its parts are passed in; it owns none of them."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        watcher: Watcher,
        executors: Sequence[Executor | RemoteExecutor],
        judge: Judge,
        destinations: Mapping[int, Destination],
        metrics: Metrics,
        schedule: Schedule | None = None,
        looks: Sequence[RunningLook] = (),
        unpacker: Unpacker | None = None,
        outbox: Outbox | None = None,
        retry: Retry | None = None,
        reuse_results: bool = True,
    ) -> None:
        self.ledger = ledger
        self.record_of = ledger.record_of
        self.watcher = watcher
        self.executors = executors
        self.metrics = metrics
        self.looks, self.unpacker = looks, unpacker
        self.retry = retry or Retry()
        self.outbox = outbox or Outbox()
        self.schedule = schedule or Schedule()
        self.publisher = Publisher(
            ledger, destinations, self.outbox, self.retry, self.schedule, metrics.counts.changed
        )
        self._judge = judge
        self._reuse_results = reuse_results
        self._roots = {inbox: destination.inbox for inbox, destination in destinations.items()}
        self._finished_at = time.monotonic()  # when an image was last finished
        self._destinations = destinations
        self.bins: dict[str, None] = {}  # that images got in this run
        self._handing_out, self._asking = anyio.Lock(), anyio.CancelScope()
        self.is_idle = False  # an executor wants jobs, and none are due, or there are no more
        self._changed = anyio.Event()  # set, and replaced, when there may be more to do
        self._published: asyncio.Queue[Published] = asyncio.Queue(UNCONFIRMED)
        self._watching = anyio.CancelScope()
        self._over, self.draining = anyio.Event(), False  # set: nothing will be handed out any more

    async def run(self, *, once: bool = False, limit: int = 0) -> None:
        """Work until drained. With `once`, stop when every file that is there is finished; with a limit,
        after that many."""
        self.schedule.limit = limit or None
        async with anyio.create_task_group() as tasks:
            for task in (self.confirm, self.publisher.release, self.outbox.run):
                tasks.start_soon(task)
            tasks.start_soon(self.watch, once)
            for executor in self.executors:
                tasks.start_soon(executor.run, self)
            for look in self.looks:
                tasks.start_soon(look.run, self)
            if self.unpacker:
                tasks.start_soon(self.unpacker.run, self)
            await self._over.wait()
            while self.schedule.in_hand:
                await self._changed.wait()
            await finish_looks(self.looks, self.pause)
            if owed := self.schedule.owed():  # of an executor that was lost only now
                await self.recover({entry.job.inbox for entry in owed})
            if once and not self.draining:
                await self.publisher.try_again()
            await self.outbox.finish()
            tasks.cancel_scope.cancel()

    def held_back(self) -> list[str]:
        """Why some images wait while others go on."""
        return self.watcher.held_back() + self.unreadable() + self.publisher.held_back()

    def unreadable(self) -> list[str]:
        """The inboxes whose images cannot be read, and why."""
        return [
            f"images of inbox {os.fsdecode(self._roots[inbox])} wait, as they cannot be read: {why}"
            for inbox, why in self.schedule.away().items()
        ]

    def drain(self, seconds: float = math.inf) -> None:
        """Take no more images, and release those that wait for a worker.
        `run` returns when the rest is finished.

        seconds: the time for that. The sinks get half of it at most.
        """
        self.draining = self.retry.hurried = True
        self._over.set()
        self._asking.cancel()
        self._watching.cancel()
        self.outbox.drain(seconds / 2)
        for part in (*self.executors, *self.looks):
            part.drain()
        if self.unpacker:
            self.unpacker.drain()
        self.wake()

    @property
    def in_flight(self) -> int:
        """Images that were taken, and those that a lost executor has left to be published here."""
        return self.schedule.taken

    @property
    def has_sinks(self) -> bool:
        return bool(self.outbox.deliveries)

    def states(self) -> list[ExecutorState]:
        return [executor.state() for executor in self.executors]

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
        """There may be more to do: new rows, images to be retried or processed again, files that nobody holds any more."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def pause(self, seconds: float) -> None:
        """Until there may be more to do, or for so long."""
        with anyio.move_on_after(seconds):
            await self._changed.wait()

    async def recover(self, inboxes: Collection[int]) -> None:
        """Publish what is owed, before anything else of the same inbox: by the last daemon or an executor that was lost."""
        inboxes, doubts = set(inboxes), self.schedule.doubts
        owed = [entry for entry in self.schedule.owed() if entry.job.inbox in inboxes]
        await self.publisher.publish_owed(inboxes)
        self.schedule.settle(inboxes if doubts == self.schedule.doubts else (), owed)
        if owed:
            self.wake()

    # 1. A file appears and is complete.

    async def watch(self, once: bool) -> None:
        with self._watching:
            if once:  # else `Publisher.watch` does it
                await self.publisher.look_again()
            await self.watcher.run(self.admit, self.wake, once=once)
        self.schedule.found_all = True
        self.wake()

    async def admit(self, files: list[File]) -> None:
        """Write a row for each new version of files of one inbox. A backlog of a million files is a million rows,
        not a million objects in memory."""
        if self.unpacker:
            files = await self.unpacker.sort(files)
        admitted = await self.ledger.admit(files)
        self.metrics.admitted(admitted, files[0].inbox if files else 0)
        if admitted.replaced:  # perhaps some that wait in memory
            self.schedule.forget_waiting()
            self.ledger.read_again()
        if admitted.pending or admitted.renamed:
            self.wake()

    # 2. An executor asks for jobs.

    async def next_jobs(self, executor: object) -> list[Job]:
        """Wait for the next jobs; an empty list when there will be no more."""
        jobs: list[Job] = []
        async with self._handing_out:
            with anyio.CancelScope() as self._asking:
                while not (jobs or self._over.is_set()):
                    jobs = await self._find_or_wait(executor)
        self.is_idle = not jobs
        return jobs

    async def _find_or_wait(self, executor: object) -> list[Job]:
        """Jobs for this executor. If there are none, wait until there may be some, or note that there will be no more."""
        changed = self._changed  # before all that waits, in which another inbox may begin to answer
        if unsettled := self.schedule.unsettled(self.answering()):
            with anyio.CancelScope(shield=True):  # An executor that asks may be lost meanwhile.
                await self.recover(unsettled)
        # What is passed over now may be due by the time that the ledger has answered.
        asked_at, was_busy = time.monotonic(), self.schedule.taken > 0
        resting = self.schedule.resting(asked_at)
        if jobs := await self._find(executor, FEED):
            return jobs
        lasting = self.schedule.lasting() if self.schedule.found_all else frozenset[int]()
        pause = await self.ledger.seconds_to_next_try(time.monotonic() - asked_at, lasting)
        if changed.is_set():
            return []
        later = pause is not None or bool(resting - lasting)
        if not was_busy and await self._has_nothing_left(later=later):
            self._over.set()
            self.wake()
            return []
        self.is_idle = True
        with anyio.move_on_after(1.0 if pause is None else min(pause, 1.0)):
            await changed.wait()
        return []

    async def next_container(self, unpacker: object) -> Job | None:
        """A file that is to be unpacked, if one can be now."""
        jobs = await self._find(unpacker, 1, containers=True)
        return jobs[0] if jobs else None

    async def _find(self, executor: object, most: int, *, containers: bool = False) -> list[Job]:
        """Jobs for this executor, of those that wait in memory or in the ledger."""
        take = partial(self.schedule.take, executor, most, containers=containers)
        if jobs := take(self.answering(), time.monotonic()):
            return jobs
        if question := self.schedule.ask(most, self.answering(), time.monotonic()):
            found = await self.ledger.next_jobs(*question, containers=containers)
            self.schedule.offer(found, containers=containers)
        return [] if self.draining else take(self.answering(), time.monotonic())

    async def _has_nothing_left(self, *, later: bool) -> bool:
        """Whether this run has nothing left to hand out. later: as in Schedule.is_over."""
        if not self.schedule.is_over(time.monotonic(), later=later):
            return False
        question = self.schedule.ask(1, self.answering(), time.monotonic()) if self.unpacker else None
        return question is None or not await self.ledger.has_containers(question.inboxes)

    def answering(self) -> set[int]:
        """The inboxes that can be listed now."""
        return self.watcher.answering()

    async def take_as_image(self, job: Job) -> None:
        """A file that waited to be unpacked is an image after all."""
        await self.ledger.take_as_image(job.id)
        self.schedule.forget(job.id)
        self.wake()

    # 3. The executor asks and reports what concerns the ledger, in groups.

    async def note_read(self, read: Mapping[int, Read]) -> dict[int, Content]:
        entries = self.schedule.entries
        self._note_unavailable([(entries[image].job.inbox, each) for image, each in read.items()])
        if not self._reuse_results:
            return {}
        return await self.ledger.recall({image: each.digest for image, each in read.items() if each.digest})

    def _note_unavailable(self, reads: Sequence[tuple[int, Read]]) -> None:
        noted = self.schedule.note_read(reads, time.monotonic())
        for inbox in noted.back:
            log.info("inbox can be read again", path=os.fsdecode(self._roots[inbox]))
        for inbox, why in noted.away.items():
            path = os.fsdecode(self._roots[inbox])
            log.warning("images of an inbox cannot be read; they wait", path=path, error=why)

    async def keep(self, contents: Sequence[Content]) -> None:
        await self.ledger.keep(contents)

    async def blame(self, image: int, deaths: int) -> None:
        self.schedule.blame(image, deaths)
        await self.ledger.blame(image, deaths)

    async def end(self, endings: Sequence[Ending]) -> Committed:
        if hidden := await self.find_hidden(endings):
            self._note_unavailable([(e.job.inbox, Read(failure=e.failure)) for e in hidden.values()])
            endings = [hidden.get(ending.job.id, ending) for ending in endings]
        committed = await self.ledger.end(endings, self._judge.endings)
        self.schedule.end(committed.endings, committed.newest)
        if new := {ending.bin for ending in committed.endings if ending.bin} - self.bins.keys():
            self.bins |= dict.fromkeys(sorted(new))
            for destination in self._destinations.values():
                destination.known_bins.update(map(os.fsencode, new))
        return committed

    async def find_hidden(self, endings: Iterable[Ending]) -> dict[int, Ending]:
        """Those whose files may only be away, or are still being written, by image: they wait instead."""
        if not (doubtful := [ending for ending in endings if ending.is_doubtful]):
            return {}
        hidden = await self.watcher.find_hidden(doubtful, self.publisher.check_folders)
        now, mine = time.time(), [ending for ending in doubtful if ending.job.id in hidden]
        return {e.job.id: self._judge.failed(e.job, hidden[e.job.id], now, e.content) for e in mine}

    async def note_published(self, group: Published) -> None:
        self.schedule.publish(ending.job.id for ending in group.endings)
        self.publisher.note(group.publication)
        await self._published.put(group)

    def let_go(self, images: Sequence[int]) -> None:
        self.schedule.give_back(images)
        self.wake()

    def lose(self, executor: object) -> int:
        """An executor was lost: its jobs are handed out again, and what it had committed is published. Returns how many."""
        images = self.schedule.has(executor)
        self._count_ended(self.schedule.lose(executor))
        self.wake()
        return images

    # 4. The results are confirmed to be on the disk. results/outbox.py takes them on to the sinks.

    async def confirm(self) -> None:
        """Mark as published only what would survive a power failure.
        Groups that arrived during one sync share the next."""
        while True:
            groups = [await self._published.get()]
            groups += [self._published.get_nowait() for _ in range(self._published.qsize())]
            is_sure = await self.publisher.confirm([group.publication for group in groups])
            if not is_sure:
                self.schedule.unsettle()  # second looks are owed too
            self._finished_at = time.monotonic()
            for group in groups:
                images = [ending.job.id for ending in group.endings]
                self._count_ended((self.schedule.confirm if is_sure else self.schedule.owe)(images))
                if group.confirmed:
                    group.confirmed.set()
            for look in self.looks:
                look.coordinator.wake()
            self.wake()

    def _count_ended(self, entries: Sequence[Entry]) -> None:
        """Count these in the metrics, and log why there is no result."""
        endings = [(entry.ending, entry.is_newest) for entry in entries if entry.ending]
        lasting = [e for e, is_newest in endings if is_newest or e.status is JobStatus.PENDING]
        self.metrics.finished(lasting)
        if renamed := {e.job.inbox for e, _ in endings if e.left is not None}:
            self.publisher.note_renamed(renamed)
        log_failures(lasting, self._roots)
