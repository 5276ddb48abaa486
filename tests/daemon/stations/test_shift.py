"""A station's shift: which jobs it gets, and when it has none left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.abc
import pytest

from daemon.jobs import Job
from daemon.results.destinations import Publication
from daemon.stations import shift as shifts
from daemon.stations.shift import Shift
from daemon.stations.station import Published
from tests.daemon_process import PATIENCE
from tests.makers import done, make_job

pytestmark = pytest.mark.anyio


class Pipeline:
    """Hands out these jobs, and then waits."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)

    async def next_jobs(self) -> list[Job]:
        if not self.jobs:
            await anyio.sleep_forever()
        jobs, self.jobs = self.jobs, []
        return jobs

    async def note_published(self, group: Published) -> None: ...

    def let_go(self, jobs: Sequence[Job]) -> None: ...

    async def take_back(self, *_: object) -> None: ...


def open_shift(jobs: Sequence[Job], generation: int = 0, *, on_trial: bool = False) -> Shift:
    station: Any = SimpleNamespace(stop=lambda: None, drain=lambda **_: None)
    pipeline: Any = Pipeline(jobs)
    return Shift(station, pipeline, generation, on_trial=on_trial)


async def test_it_gives_each_job_the_generation_of_its_models() -> None:
    shift = open_shift([make_job(id=1), make_job(id=2)], 3)
    assert [job.generation for job in await shift.next_jobs()] == [3, 3]


async def test_it_is_finished_when_all_its_jobs_have_left_the_station() -> None:
    published, let_go, lost, committed = jobs = [make_job(id=number) for number in range(4)]
    shift = open_shift(jobs)
    await shift.next_jobs()
    ended = anyio.Event()

    async def finish() -> None:
        await shift.finish()
        ended.set()

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(finish)
            await anyio.wait_all_tasks_blocked()
            await shift.note_published(Published([done(published)], {0}, Publication([], {}, set(), [], [])))
            shift.let_go([let_go])
            assert not ended.is_set()
            await shift.take_back([lost], [done(committed)], {3})
            await ended.wait()


async def test_jobs_that_wait_for_a_worker_do_not_wait_for_its_last_batches() -> None:
    shift, drained = open_shift([]), list[dict[str, bool]]()
    station: Any = SimpleNamespace(drain=lambda **how: drained.append(how))
    shift.station = station
    await shift.finish()
    assert drained == [{"hurried": False}], "a full disk is waited for"


async def test_a_station_that_waits_for_jobs_is_told_that_its_shift_is_over() -> None:
    shift, heard = open_shift([]), list[list[Job]]()

    async def ask() -> None:
        heard.append(await shift.next_jobs())

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            await shift.finish()
    assert heard == [[]]


async def test_jobs_that_arrive_as_the_shift_ends_are_given_back() -> None:
    answer: asyncio.Future[list[Job]] = asyncio.get_running_loop().create_future()
    shift, given_back = open_shift([]), list[Job]()
    coordinator: Any = SimpleNamespace(next_jobs=lambda: answer, let_go=given_back.extend)
    shift._coordinator = coordinator
    heard = list[list[Job]]()

    async def ask() -> None:
        heard.append(await shift.next_jobs())

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            answer.set_result([job := make_job()])  # the task that asked has not run yet
            await shift.finish()
    assert (heard, given_back) == ([[]], [job])


@pytest.mark.parametrize("waiting", [0, 1], ids=["no job", "one job"])
async def test_after_its_shift_a_station_gets_no_jobs_and_does_not_wait_for_any(waiting: int) -> None:
    shift = open_shift([make_job()][:waiting])
    await shift.finish()
    with anyio.fail_after(PATIENCE):
        assert await shift.next_jobs() == []


@pytest.mark.parametrize("then", ["accept", "drain"])
async def test_on_trial_a_station_gets_no_jobs_before_it_is_accepted_or_all_stop(then: str) -> None:
    shift, heard = open_shift([make_job()], on_trial=True), list[list[Job]]()

    async def ask() -> None:
        heard.append(await shift.next_jobs())

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert heard == []
            getattr(shift, then)()
    assert len(heard[0]) == 1


async def test_workers_that_hang_while_they_end_hold_up_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shifts, "LEAVE_SECONDS", 0.05)

    async def staff(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        task_status.started()
        await anyio.sleep_forever()

    shift = open_shift([])
    station: Any = SimpleNamespace(staff=staff, stop=lambda: None)
    shift.station = station
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            await tasks.start(shift.staff)
            await shift.leave()


async def test_the_pause_of_an_exchange_ends_with_the_first_results_and_is_reported_once() -> None:
    jobs = [make_job(id=number) for number in (1, 2)]
    shift, reported = open_shift(jobs), list[float]()
    shift.when_published = reported.append
    await shift.next_jobs()
    for job in jobs:
        assert bool(reported) == (job is jobs[1])
        await shift.note_published(Published([done(job)], {job.id}, Publication(0, [], set(), [], [])))
    [seconds] = reported
    assert 0 <= seconds < PATIENCE
