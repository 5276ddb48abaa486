"""The coordinator of a second look's executor: hands out the images that wait for the look, and commits how they
ended.

A look has its own executor (executor.py) with its own slab, queue and workers, so it holds up no first look.
Its images stay DONE. When a look ends, the sidecar is written again; other versions of the file wait until then.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import anyio
import structlog
from anyio import to_thread

from daemon.core.errors import VisiondError
from daemon.core.jobs import Attempt, Content, Ending, Job, JobStatus, Read
from daemon.ledger import looks
from daemon.ledger.joining import assemble
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Committed, Model, Record
from daemon.ledger.rows import Key
from daemon.ledger.statements import SQL, run_rows
from daemon.pipeline.executor import Published
from daemon.pipeline.schedule import FileKey, Question, Schedule
from daemon.results.judge import Judge

log = structlog.get_logger()

POLL_SECONDS = 1.0
LEAST_TAKEN, MOST_GATHERED = 16, 256  # images
GATHER_SECONDS = 2.0  # the longest time that images wait for others
COUNT_SECONDS = 5.0  # between two counts of the images that wait, for status and metrics
# The bucket's size. At most the images of one second are taken at once; the rest makes up for the time until that is noticed.
BUCKET_SECONDS = 1.25
REST_SECONDS = 30.0  # until an inbox is tried again that was missing or empty

T = TypeVar("T")


class Budget:
    """Limits the rate of a second look: a token bucket. At most `rate` images/s; 0: no limit."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: monotonic seconds."""
        self.rate = rate
        self._clock = clock
        self._most = max(1, int(rate))
        self._size = BUCKET_SECONDS * max(1.0, rate)
        self._left = max(1.0, rate)
        self._at = clock()

    def most(self, wanted: int) -> int:
        """The most images that can be taken at once: this number, or fewer if the rate allows fewer."""
        return min(wanted, self._most) if self.rate else wanted

    def room(self, most: int) -> int:
        """How many images may be taken now, at most this number."""
        if not self.rate:
            return most
        now = self._clock()
        self._left = min(self._size, self._left + (now - self._at) * self.rate)
        self._at = now
        return min(most, self._most, int(self._left))

    def take(self, images: int) -> None:
        if self.rate:
            self._left -= images

    def seconds_to(self, images: int) -> float:
        """Seconds until there is room for this many images."""
        return max(0.0, (images - self._left) / self.rate) if self.rate else 0.0


class LookJudge:
    """Decides how a look ends: DONE with its result, another attempt, or FAILED."""

    def __init__(self, judge: Judge) -> None:
        """judge: for the number of attempts."""
        self._judge = judge

    def is_decided(self, content: Content) -> bool:
        return False

    def endings(self, attempts: Sequence[Attempt]) -> list[Ending]:
        return [self._ending(attempt, time.time()) for attempt in attempts]

    def _ending(self, attempt: Attempt, now: float) -> Ending:
        job = attempt.job
        if attempt.gone:
            return Ending(job, JobStatus.GONE, now, job.attempts)
        if attempt.failure is None:
            return Ending(job, JobStatus.DONE, now, job.attempts + 1, content=attempt.content)
        ending = self._judge.failed(job, attempt.failure, now)
        if ending.status is JobStatus.PENDING:
            return ending
        return Ending(job, JobStatus.FAILED, now, ending.attempts, failure=ending.failure)


class FirstLooks(Protocol):
    """What the coordinator of a second look needs of the first ones."""

    def answering(self) -> set[int]:
        """The inboxes that can be listed."""

    async def find_hidden(self, endings: Iterable[Ending]) -> dict[int, Ending]:
        """Those whose files may only be away, or are still being written, by image: they wait instead."""

    async def pause(self, seconds: float) -> None:
        """Until there may be more to do, or for so long."""

    def wake(self) -> None:
        """Jobs that waited for a file can go on."""

    async def note_published(self, group: Published) -> None:
        """Results are written to files. Sets `group.confirmed` when they are on the disk."""

    @property
    def in_flight(self) -> int:
        """How many first looks are at work."""


class LookCoordinator:
    """Hands out the images of one look."""

    def __init__(
        self,
        name: str,
        model: Model,
        batch_size: int,
        rate: float,
        ledger: Ledger,
        schedule: Schedule,
        roots: Mapping[int, bytes],
        *,
        gathers: bool = False,
        reuse: bool = True,
    ) -> None:
        """batch_size: of the look's workers. rate: at most this many images/s; 0: no limit. roots: the inboxes'
        folders. gathers: whether first looks use a device of this look; images then wait for others while first looks are
        at work. reuse: whether to use results that the ledger has."""
        self.name, self.model = name, model
        self._gathered = min(batch_size, MOST_GATHERED) if gathers else 1
        self._taken = max(LEAST_TAKEN, batch_size)
        self.tally = looks.Tally(0, 0, 0)  # as last counted in the ledger
        self._ledger, self._schedule = ledger, schedule
        self._roots = roots
        self._reuse = reuse
        self._budget = Budget(rate)
        self._models: dict[int, Model] = {}  # of the ledger
        self._number = 0  # of the look's model in the ledger
        self._damaged: set[Key] = set()
        self._holding: set[FileKey] = set()
        self._resting: dict[int, float] = {}  # inbox → when it may be tried again, in monotonic seconds
        self._changed = anyio.Event()
        self._stopped = False

    def limit(self, rate: float) -> None:
        """From now on at most this many images/s; 0: no limit."""
        if rate != self._budget.rate:
            self._budget = Budget(rate)
            self.wake()

    def wake(self) -> None:
        """More images may wait for the look."""
        self._changed.set()

    def stop(self) -> None:
        """Hand out no more. What is in flight waits for the next start."""
        self._stopped = True
        self._changed.set()
        self._schedule.forget_look(self.name)
        self._release(set(self._holding))

    @property
    def in_flight(self) -> int:
        return len(self._schedule.looked_at(self.name))

    async def open(self, first_looks: FirstLooks) -> None:
        """Find the look's model in the ledger."""
        self._first_looks = first_looks
        self._models = self._ledger.models
        [self._number] = [number for number, model in self._models.items() if model == self.model]

    async def count(self, read: Callable[[str], looks.Tally]) -> None:
        """Keep the tally up to date, until cancelled. read: counts in the ledger, without its writing thread."""
        while True:
            started = time.monotonic()
            with contextlib.suppress(sqlite3.Error, VisiondError):  # the next one may succeed
                self.tally = await to_thread.run_sync(read, self.name)
            # Ten million rows take some seconds.
            await anyio.sleep(max(COUNT_SECONDS, 20 * (time.monotonic() - started)))

    async def is_idle(self) -> bool:
        """Whether this run has no image left to look at. Images that are not published do not count."""
        if self._stopped:
            return True
        question = self._question(1)
        wanted = partial(looks.is_wanted, name=self.name, inboxes=question.inboxes, only=question.only)
        return not await self._ask(wanted)

    def _question(self, most: int) -> Question:
        return self._schedule.ask_look(self.name, most, self._readable(), time.monotonic())

    def _readable(self) -> set[int]:
        now = time.monotonic()
        self._resting = {inbox: until for inbox, until in self._resting.items() if until > now}
        return self._first_looks.answering() - self._resting.keys()

    async def _pause(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._changed.wait()
        self._changed = anyio.Event()

    async def _ask(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._ledger.insist(work)

    # As the coordinator of an executor: see executor.py.

    async def next_jobs(self, executor: object) -> list[Job]:
        """Wait for the next jobs; an empty list when there will be no more. Images may have to wait until they fill a
        batch: a smaller one takes nearly as much of the device's time."""
        seen_at = math.inf  # since when there are images, but too few for a batch
        while not self._stopped:
            enough = self._budget.most(self._gathered)
            room = self._budget.room(self._taken)
            found = await self._take(room) if room else looks.WaitingLooks([], some_left=False)
            seen_at = min(seen_at, time.monotonic()) if found.jobs else math.inf
            left = seen_at + GATHER_SECONDS - time.monotonic()
            if found.jobs and (len(found.jobs) >= enough or left <= 0 or not self._first_looks.in_flight):
                self._budget.take(len(found.jobs))
                self._schedule.take_look(self.name, found.jobs)
                return found.jobs
            if room < enough or not found.some_left:
                pause = self._budget.seconds_to(enough if found.jobs else 1) or POLL_SECONDS
                await self._pause(min(POLL_SECONDS, left, pause))
        return []

    async def _take(self, limit: int) -> looks.WaitingLooks:
        most, busy, inboxes, only = self._question(limit)
        return await self._ask(
            partial(looks.take, name=self.name, limit=most, busy=busy, inboxes=inboxes, only=only)
        )

    async def note_read(self, read: Mapping[int, Read]) -> dict[int, Content | None]:
        digests = [(image, each.digest) for image, each in read.items() if each.digest]
        recall = partial(
            looks.recall, read=digests, models=self._models, number=self._number, reuse=self._reuse
        )
        known, damaged = await self._ask(recall)
        self._damaged |= damaged
        return {image: known.get(image) for image, _ in digests}

    def _rest(self, inboxes: set[int]) -> None:
        for inbox in inboxes - self._resting.keys():
            folder = os.fsdecode(self._roots[inbox])
            log.warning("second looks wait for an inbox that cannot be read", look=self.name, inbox=folder)
        self._resting |= dict.fromkeys(inboxes, time.monotonic() + REST_SECONDS)

    async def keep(self, contents: Sequence[Content]) -> None:
        raise AssertionError("a look has one segment")

    async def blame(self, image: int, deaths: int) -> None:
        row = (deaths, image, self.name)
        await self._ask(lambda connection: connection.execute(SQL["blame_look"], row))

    async def end(self, endings: Sequence[Ending]) -> Committed:
        """The newest are the images that are published again."""
        hidden = await self._first_looks.find_hidden(endings)
        endings = [hidden.get(ending.job.id, ending) for ending in endings]
        self._rest({ending.job.inbox for ending in endings if ending.failure and ending.failure.away})
        files = {(e.job.inbox, e.job.path) for e in endings}
        while not self._schedule.hold(files, self):
            await self._first_looks.pause(POLL_SECONDS)
        self._holding |= files

        def work(connection: sqlite3.Connection) -> list[Record]:
            ended = looks.end(connection, self.name, endings, self._models, self._number, self._damaged)
            rows = run_rows(connection, "images", [(image,) for image in ended])
            return list(assemble(connection, rows, self._models))

        records = await self._ask(work)
        self._damaged.clear()
        # The next start repairs what is damaged: it is not marked as published.
        sound = {record.id: record for record in records if not record.damage}
        self._log_failures(endings)
        return Committed(list(endings), set(sound), sound)

    def _log_failures(self, endings: Sequence[Ending]) -> None:
        for ending in endings:
            if (failure := ending.failure) and failure.is_logged:
                log.warning(
                    "second look failed" if ending.status is JobStatus.FAILED else "second look not done",
                    look=self.name,
                    image=ending.job.id,
                    reason=failure.reason.value,
                    detail=failure.detail,
                )

    async def note_published(self, group: Published) -> None:
        confirmed = anyio.Event()
        await self._first_looks.note_published(Published([], set(), group.publication, confirmed))
        await confirmed.wait()
        self._release({(e.job.inbox, e.job.path) for e in group.endings})
        self.let_go([ending.job.id for ending in group.endings])

    def let_go(self, images: Sequence[int]) -> None:
        self._schedule.leave_look(self.name, images)
        self.wake()

    def _release(self, files: set[FileKey]) -> None:
        if files:
            self._holding -= files
            self._schedule.release(files, self)
            self._first_looks.wake()
