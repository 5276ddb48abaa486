"""An executor: a station at work with one generation of models. An exchange of models (daemon/service/exchange.py)
retires it, and another one takes its place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import anyio
import anyio.abc

from daemon.core.errors import ModelsUnusable, NoWorkersLeft, leaves
from daemon.core.jobs import Job
from daemon.pipeline.remote import RemoteHome, RemoteStation
from daemon.pipeline.station import Station
from daemon.system.children import END_SECONDS

LEAVE_SECONDS = END_SECONDS  # for workers to end by themselves


class _Signal(anyio.abc.TaskStatus[None]):
    """Sets an event in place of the end of `TaskGroup.start`."""

    def __init__(self, event: anyio.Event) -> None:
        self._event = event

    def started(self, value: None = None) -> None:
        self._event.set()


class Executor:
    """What the coordinator knows of a station. It is also the one to whom the schedule gives jobs."""

    def __init__(
        self, station: Station | RemoteStation, generation: int = 0, *, on_trial: bool = False
    ) -> None:
        """generation: of the station's models. on_trial: the station gets no jobs before `accept`."""
        self.station = station
        self.generation = generation
        self.problem = ""  # why the models of a station on trial did not load
        self.is_retired = False
        self.is_idle = False  # the station wants jobs, and none are due, or it gets no more
        # Called once: with the seconds from the first jobs to the first results.
        self.when_published: Callable[[float], None] | None = None
        self._asking = anyio.CancelScope()
        self._accepted = anyio.Event()
        self._began = 0.0  # monotonic seconds: when it got its first jobs
        self._staffed, self._left = anyio.Event(), anyio.Event()
        self._work, self._staffing = anyio.CancelScope(), anyio.CancelScope()
        if not on_trial:
            self._accepted.set()

    async def run(self, coordinator: RemoteHome) -> None:
        """Work until cancelled, or until the end of `leave`."""
        with self._work:
            await self.station.run(coordinator)

    async def staff(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run the station's workers until it is stopped. Reports as started when all have loaded their models.
        Raises NoWorkersLeft, ModelsUnusable, unless it is on trial, and Hurried."""
        try:
            with self._staffing:
                await self.station.staff(task_status=task_status)
        except* (ModelsUnusable, NoWorkersLeft) as group:
            if self.is_accepted:
                raise
            self.problem = str(next(leaves(group)))
        finally:
            self._left.set()
            self._staffed.set()

    async def try_out(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start its workers in these tasks. Returns when they have loaded their models, or will not."""
        tasks.start_soon(partial(self.staff, task_status=_Signal(self._staffed)))
        await self._staffed.wait()

    @property
    def is_accepted(self) -> bool:
        """Not on trial any more, nor given up on trial."""
        return self._accepted.is_set()

    async def ask(self, find: Callable[[], Awaitable[list[Job]]]) -> list[Job]:
        """The jobs that `find` finds for the station; none if it gets no more."""
        jobs: list[Job] = []
        with anyio.CancelScope() as self._asking:
            await self._accepted.wait()
            if not self.is_retired:
                jobs = await find()
        if jobs:
            self._began = self._began or time.monotonic()
        self.is_idle = not jobs
        return jobs

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """While no jobs are due."""
        self.is_idle = True
        try:
            yield
        finally:
            self.is_idle = False

    def accept(self) -> None:
        """The station gets jobs from now on, and an error in it is an error of the daemon."""
        self._accepted.set()

    def give_up(self) -> None:
        """End its workers while they load."""
        self.station.stop()
        self._staffing.cancel()

    def drain(self) -> None:
        self._asking.cancel()
        self.station.drain()

    def retire(self) -> None:
        """The station gets no more jobs, and gives back those that wait for a worker."""
        self.is_retired = True
        self._asking.cancel()
        self.station.drain(hurried=False)

    async def leave(self) -> None:
        """End its workers, which have no jobs any more. Returns when they are gone, and so is what they had on GPUs."""
        self.station.stop()
        with anyio.move_on_after(LEAVE_SECONDS):
            await self._left.wait()
        self._staffing.cancel()  # a worker that hangs is killed
        await self._left.wait()
        self._work.cancel()

    def note_results(self) -> None:
        """Some of its results are published."""
        if report := self.when_published:
            self.when_published = None
            report(time.monotonic() - self._began)
