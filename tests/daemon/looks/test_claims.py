"""Who has a file in hand."""

from __future__ import annotations

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from daemon.looks.claims import Claims
from tests.daemon_process import PATIENCE

pytestmark = pytest.mark.anyio

A, B = (1, b"a.jpg"), (1, b"b.jpg")


async def test_a_file_whose_look_is_published_is_kept_from_jobs() -> None:
    claims = Claims()
    await claims.hold({A})
    assert (A in claims, B in claims) == (True, False)
    claims.release({A})
    assert A not in claims


async def test_a_look_waits_for_the_job_that_has_its_file() -> None:
    claims, order = Claims(), []
    claims.jobs.add(A)

    async def hold() -> None:
        await claims.hold({A, B})
        order.append("held")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold)
        await wait_all_tasks_blocked()
        order.append("released")
        claims.release_job(A)
    assert order == ["released", "held"]


async def test_looks_that_wait_for_one_file_get_it_one_after_another() -> None:
    claims, holders, most = Claims(), 0, 0

    async def hold() -> None:
        nonlocal holders, most
        await claims.hold({A})
        holders += 1
        most = max(most, holders)
        await anyio.lowlevel.checkpoint()
        holders -= 1
        claims.release({A})

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(hold)
    assert most == 1


async def test_owed_files_wait_for_second_looks_only() -> None:
    claims = Claims()
    claims.jobs.add(A)
    with anyio.fail_after(PATIENCE):
        await claims.wait_for({A})
