"""An executor: which jobs its station gets, and how it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import anyio.abc
import pytest

from daemon.core.jobs import Job
from daemon.pipeline import executor as executors
from daemon.pipeline.executor import Executor
from tests.daemon_process import PATIENCE
from tests.makers import make_job

pytestmark = pytest.mark.anyio


def open_executor(generation: int = 0, *, on_trial: bool = False) -> Executor:
    station: Any = SimpleNamespace(stop=lambda: None, drain=lambda **_: None)
    return Executor(station, generation, on_trial=on_trial)


async def find() -> list[Job]:
    return [make_job(id=1), make_job(id=2)]


async def find_none() -> list[Job]:
    await anyio.sleep_forever()
    raise AssertionError


async def test_jobs_that_wait_for_a_worker_do_not_wait_for_its_last_batches() -> None:
    executor, drained = open_executor(), list[dict[str, bool]]()
    station: Any = SimpleNamespace(drain=lambda **how: drained.append(how))
    executor.station = station
    executor.retire()
    assert drained == [{"hurried": False}], "a full disk is waited for"


@pytest.mark.parametrize("end", ["retire", "drain"])
@pytest.mark.parametrize("on_trial", [False, True])
async def test_a_station_that_waits_for_jobs_is_told_that_it_gets_no_more(end: str, on_trial: bool) -> None:
    executor, heard = open_executor(on_trial=on_trial), list[list[Job]]()

    async def ask() -> None:
        heard.append(await executor.ask(find_none))

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            getattr(executor, end)()
    assert heard == [[]]


async def test_once_retired_a_station_gets_no_jobs() -> None:
    executor = open_executor()
    executor.retire()
    assert await executor.ask(find) == []


async def test_on_trial_a_station_gets_no_jobs_before_it_is_accepted() -> None:
    executor, heard = open_executor(on_trial=True), list[list[Job]]()

    async def ask() -> None:
        heard.append(await executor.ask(find))

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert heard == []
            executor.accept()
    assert len(heard[0]) == 2


async def test_workers_that_hang_while_they_end_hold_up_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "LEAVE_SECONDS", 0.05)

    async def staff(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        task_status.started()
        await anyio.sleep_forever()

    executor = open_executor()
    station: Any = SimpleNamespace(staff=staff, stop=lambda: None)
    executor.station = station
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            await tasks.start(executor.staff)
            await executor.leave()


async def test_the_pause_of_an_exchange_ends_with_the_first_results_and_is_reported_once() -> None:
    executor, reported = open_executor(), list[float]()
    executor.when_published = reported.append
    await executor.ask(find)
    executor.note_results()
    executor.note_results()
    [seconds] = reported
    assert 0 <= seconds < PATIENCE
