"""A station at work with one generation of models. An exchange of models (daemon/exchanging/exchange.py) ends the
shift, and begins another one in its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import anyio
import anyio.abc

from daemon.errors import ModelsUnusable, NoWorkersLeft, leaves
from daemon.jobs import Ending, Job
from daemon.ledger.record import Record
from daemon.stations.remote import Coordinator, RemoteStation
from daemon.stations.station import Published, Station
from daemon.system.children import END_SECONDS

LEAVE_SECONDS = END_SECONDS  # for workers to end by themselves


class Signal(anyio.abc.TaskStatus[None]):
    """Sets an event in place of the end of `TaskGroup.start`."""

    def __init__(self, event: anyio.Event) -> None:
        self._event = event

    def started(self, value: None = None) -> None:
        self._event.set()


class Shift:
    """The coordinator, as this station sees it: it gives each job its generation, and knows when the station has
    no jobs left."""

    def __init__(
        self,
        station: Station | RemoteStation,
        coordinator: Coordinator,
        generation: int = 0,
        *,
        on_trial: bool = False,
    ) -> None:
        """generation: of the station's models. on_trial: the station gets no jobs before `accept`."""
        self.station = station
        self.generation = generation
        self.problem = ""  # why the models of a station on trial did not load
        # Called once: with the seconds from the first jobs to the first results.
        self.when_published: Callable[[float], None] | None = None
        self._began = 0.0  # monotonic seconds: when it got its first jobs
        self._coordinator = coordinator
        self._held: set[int] = set()  # jobs
        self._accepted, self._over = not on_trial, False
        self._may_ask, self._emptied = anyio.Event(), anyio.Event()
        self._staffed, self._left = anyio.Event(), anyio.Event()
        self._asking, self._work, self._staffing = (anyio.CancelScope() for _ in range(3))
        if not on_trial:
            self._may_ask.set()

    async def run(self) -> None:
        """Work until cancelled, or until the end of `leave`."""
        with self._work:
            await self.station.run(self)

    async def staff(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run the station's workers until it is stopped. Reports as started when all have loaded their models.
        Raises NoWorkersLeft, ModelsUnusable, unless it is on trial, and Hurried."""
        try:
            with self._staffing:
                await self.station.staff(task_status=task_status)
        except* (ModelsUnusable, NoWorkersLeft) as group:
            if self._accepted:
                raise
            self.problem = str(next(leaves(group)))
        finally:
            self._left.set()
            self._staffed.set()

    async def try_out(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start its workers in these tasks. Returns when they have loaded their models, or will not."""
        tasks.start_soon(partial(self.staff, task_status=Signal(self._staffed)))
        await self._staffed.wait()

    @property
    def is_accepted(self) -> bool:
        """Not on trial any more, nor given up on trial."""
        return self._accepted

    def accept(self) -> None:
        """The station gets jobs from now on, and an error in it is an error of the daemon."""
        self._accepted = True
        self._may_ask.set()

    def give_up(self) -> None:
        """End its workers while they load."""
        self.station.stop()
        self._staffing.cancel()

    def drain(self) -> None:
        self._may_ask.set()  # so that the coordinator can answer that there are no more
        self.station.drain()

    async def finish(self) -> None:
        """The station gets no more jobs, and gives back those that wait for a worker. Returns when the results of the
        others are published."""
        self._over = True
        self._may_ask.set()
        self._asking.cancel()
        self.station.drain(hurried=False)
        while self._held:
            self._emptied = anyio.Event()
            await self._emptied.wait()

    async def leave(self) -> None:
        """End its workers, which have no jobs any more. Returns when they are gone, and so is what they had on GPUs."""
        self.station.stop()
        with anyio.move_on_after(LEAVE_SECONDS):
            await self._left.wait()
        self._staffing.cancel()  # a worker that hangs is killed
        await self._left.wait()
        self._work.cancel()

    # What the station asks and reports.

    async def next_jobs(self) -> list[Job]:
        await self._may_ask.wait()
        jobs: list[Job] = []
        if not self._over:
            with anyio.CancelScope() as self._asking:
                jobs = await self._coordinator.next_jobs()
        if self._over and jobs:  # an answer that was on its way cannot be cancelled
            self._coordinator.let_go(jobs)
            jobs = []
        if jobs and not self._began:
            self._began = time.monotonic()
        for job in jobs:
            job.generation = self.generation
            self._held.add(job.id)
        return jobs

    async def note_read(self, jobs: Sequence[Job]) -> None:
        await self._coordinator.note_read(jobs)

    async def keep(self, jobs: Sequence[Job]) -> None:
        await self._coordinator.keep(jobs)

    async def blame(self, job: Job) -> None:
        await self._coordinator.blame(job)

    async def end(self, endings: list[Ending]) -> set[int]:
        return await self._coordinator.end(endings)

    def records_of(self, endings: Sequence[Ending]) -> list[Record]:
        return self._coordinator.records_of(endings)

    async def note_published(self, group: Published) -> None:
        await self._coordinator.note_published(group)
        if report := self.when_published:
            self.when_published = None
            report(time.monotonic() - self._began)
        self._drop([ending.job for ending in group.endings])

    def let_go(self, jobs: Sequence[Job]) -> None:
        self._coordinator.let_go(jobs)
        self._drop(jobs)

    async def take_back(self, jobs: Sequence[Job], endings: Sequence[Ending], ended: set[int]) -> None:
        await self._coordinator.take_back(jobs, endings, ended)
        self._drop([*jobs, *(ending.job for ending in endings)])

    @property
    def bins(self) -> Mapping[str, None]:
        return self._coordinator.bins

    @property
    def has_sinks(self) -> bool:
        return self._coordinator.has_sinks

    def _drop(self, jobs: Sequence[Job]) -> None:
        self._held.difference_update([job.id for job in jobs])
        if not self._held:
            self._emptied.set()
