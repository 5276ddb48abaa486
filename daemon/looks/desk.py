"""The coordinator of a second look's station: hands out the images that wait for the look, and commits how they
ended.

A look has a station of its own (stations/station.py) with its own slab, queue and workers, so it holds up no
first look. Its images are DONE all the time. When a look has ended, its image's sidecar is written again; for
that moment another version of the same file waits.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import anyio
import structlog
from anyio import to_thread

from daemon.jobs import Ending, Job, JobStatus
from daemon.ledger import looks
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model, Record
from daemon.ledger.records import assemble
from daemon.ledger.statements import SQL, run_rows
from daemon.ledger.stored import Key
from daemon.looks.budget import Budget
from daemon.results.judge import Judge
from daemon.stations.station import Published
from daemon.system.retry import Retry

log = structlog.get_logger()

TAKEN = 16  # images taken together: few, as a large model needs long for them
POLL_SECONDS = 1.0
COUNT_SECONDS = 5.0  # between two counts of the images that wait, for status and metrics

T = TypeVar("T")


class LookJudge:
    """Decides how a look ends: DONE with its result, another attempt, or FAILED."""

    def __init__(self, judge: Judge, clock: Callable[[], float] = time.time) -> None:
        """judge: for the number of attempts. clock: Unix seconds."""
        self._judge, self._clock = judge, clock

    def is_decided(self, job: Job) -> bool:
        return False

    def endings(self, jobs: Sequence[Job]) -> list[Ending]:
        return [self._ending(job, self._clock()) for job in jobs]

    def _ending(self, job: Job, now: float) -> Ending:
        if job.gone:
            return Ending(job, JobStatus.GONE, now, job.attempts)
        if job.failure is None:
            return Ending(job, JobStatus.DONE, now, job.attempts + 1)
        ending = self._judge.failed(job, job.failure, now)
        if ending.status is JobStatus.PENDING:
            return ending
        return Ending(job, JobStatus.FAILED, now, ending.attempts, failure=ending.failure)


class Home(Protocol):
    """What a desk needs of the pipeline."""

    ledger: Ledger
    retry: Retry

    def answering(self) -> set[int]:
        """The inboxes whose files can be read."""

    async def note_published(self, group: Published) -> None:
        """Results are written to files. Sets `group.confirmed` when they are on the disk."""

    async def hold(self, files: set[tuple[int, bytes]]) -> None:
        """Keep other jobs from publishing these files, by inbox and path, until `release`."""

    def release(self, files: set[tuple[int, bytes]]) -> None: ...


class Desk:
    """Hands out the images of one look."""

    def __init__(self, name: str, model: Model, rate: float, home: Home) -> None:
        """rate: at most this many images/s; 0: no limit."""
        self.name, self.model = name, model
        self.in_flight: dict[int, Job] = {}
        self.tally = looks.Tally(0, 0, 0)  # of the ledger, a moment ago
        self._home = home
        self._budget = Budget(rate)
        self._models: dict[int, Model] = {}  # of the ledger
        self._number = 0  # of the look's model in it
        self._damaged: set[Key] = set()
        self._records: dict[int, Record] = {}  # that are being published
        self._wanted = anyio.Event()
        self._draining = False

    def wake(self) -> None:
        """More images may wait for the look."""
        self._wanted.set()

    def drain(self) -> None:
        """Hand out no more."""
        self._draining = True
        self._wanted.set()

    async def open(self) -> None:
        """Find the look's model in the ledger."""
        self._models = self._home.ledger.models
        [self._number] = [number for number, model in self._models.items() if model == self.model]

    async def count(self, read: Callable[[], Mapping[str, looks.Tally]]) -> None:
        """Keep the tally up to date, until cancelled. read: counts in the ledger, without its writing thread."""
        while True:
            started = time.monotonic()
            self.tally = (await to_thread.run_sync(read)).get(self.name, looks.Tally(0, 0, 0))
            # Ten million rows take a second.
            await anyio.sleep(max(COUNT_SECONDS, 20 * (time.monotonic() - started)))

    async def is_idle(self) -> bool:
        """Whether no image waits that could get the look in this run. The source of an image that is not published
        cannot leave its inbox."""
        if self._draining:
            return True
        return not await self._ask(partial(looks.is_wanted, name=self.name, inboxes=self._home.answering()))

    async def _pause(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._wanted.wait()
        self._wanted = anyio.Event()

    async def _ask(self, work: Callable[[sqlite3.Connection], T]) -> T:
        answer: T = await self._home.retry("ledger", self._home.ledger.run, work)
        return answer

    # As the coordinator of a station: see stations/station.py.

    async def next_jobs(self) -> list[Job]:
        while not self._draining:
            room = self._budget.room(TAKEN)
            found = await self._take(room) if room else looks.Waiting([], some_left=False)
            if found.jobs:
                self._budget.take(len(found.jobs))
                self.in_flight |= {job.id: job for job in found.jobs}
                return found.jobs
            if not found.some_left:
                await self._pause(min(POLL_SECONDS, self._budget.seconds_to_next() or POLL_SECONDS))
        return []

    async def _take(self, limit: int) -> looks.Waiting:
        busy, inboxes = set(self.in_flight), self._home.answering()
        return await self._ask(partial(looks.take, name=self.name, limit=limit, busy=busy, inboxes=inboxes))

    async def note_read(self, jobs: Sequence[Job]) -> None:
        read = [job for job in jobs if job.digest]
        recall = partial(looks.recall, jobs=read, models=self._models, number=self._number)
        self._damaged |= await self._ask(recall)

    async def keep(self, jobs: Sequence[Job]) -> None:
        raise AssertionError("a look has one segment")

    async def blame(self, job: Job) -> None:
        row = (job.deaths, job.id, self.name)
        await self._ask(lambda connection: connection.execute(SQL["blame_look"], row))

    async def end(self, endings: list[Ending]) -> set[int]:
        """Returns the images that are published again: those that are the newest version of their file."""
        await self._home.hold({(e.job.inbox, e.job.path) for e in endings})

        def work(connection: sqlite3.Connection) -> list[Record]:
            ended = looks.end(connection, self.name, endings, self._models, self._number, self._damaged)
            rows = run_rows(connection, "images", [(image,) for image in ended])
            return list(assemble(connection, rows, self._models))

        records = await self._ask(work)
        self._damaged.clear()
        # The next start repairs what is damaged: it is not marked as published.
        self._records |= {record.id: record for record in records if not record.damage}
        for ending in endings:
            if ending.failure:
                log.warning(
                    "second look failed" if ending.status is JobStatus.FAILED else "second look not done",
                    look=self.name,
                    image=ending.job.id,
                    reason=ending.failure.reason.value,
                    detail=ending.failure.detail,
                )
        return {record.id for record in records if not record.damage}

    def records_of(self, endings: Sequence[Ending]) -> list[Record]:
        return [self._records.pop(ending.job.id) for ending in endings]

    async def note_published(self, group: Published) -> None:
        confirmed = anyio.Event()
        await self._home.note_published(Published([], set(), group.publication, confirmed))
        await confirmed.wait()
        self._home.release({(e.job.inbox, e.job.path) for e in group.endings})
        self.let_go([ending.job for ending in group.endings])

    def let_go(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            del self.in_flight[job.id]
        self.wake()
