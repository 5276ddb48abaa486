"""Files that are to be unpacked wait in a line of their own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from daemon.core.jobs import JobStatus
from daemon.ledger.ledger import Ledger
from daemon.ledger.waiting import has_containers, take_as_image
from tests.makers import MODELS, failed, make_file, postponed

pytestmark = pytest.mark.anyio

PRIORITY = -7


@contextlib.asynccontextmanager
async def opened(
    folder: Path, inbox: Path, *, unpacks: bool = True, priority: int = PRIORITY
) -> AsyncIterator[Ledger]:
    with contextlib.closing(Ledger(folder / "ledger.sqlite")) as ledger:
        await ledger.register([(inbox, priority)], MODELS, (), [inbox] if unpacks else [])
        yield ledger


async def drop(ledger: Ledger, images: Sequence[bytes], containers: Sequence[bytes]) -> None:
    await ledger.admit([make_file(path) for path in images])
    await ledger.admit([make_file(path)._replace(container=True) for path in containers])


async def lines(ledger: Ledger) -> tuple[list[bytes], list[bytes]]:
    """The paths of the images, and of the containers, that wait."""
    ledger.read_again()
    images = await ledger.next_jobs(9, ())
    containers = await ledger.next_jobs(9, (), containers=True)
    return [job.path for job in images], [job.path for job in containers]


async def test_images_and_containers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async with opened(tmp_path, tmp_path) as ledger:
        await drop(ledger, [b"a.jpg"], [b"a.zip", b"b.zip"])
        assert await lines(ledger) == ([b"a.jpg"], [b"a.zip", b"b.zip"])
        assert await ledger.oldest_pending() is not None


async def test_they_wait_for_unpacking_also_after_a_restart_with_another_priority(tmp_path: Path) -> None:
    async with opened(tmp_path, tmp_path) as ledger:
        await drop(ledger, [b"a.jpg"], [b"a.zip"])
    async with opened(tmp_path, tmp_path, priority=1_000_000) as ledger:
        assert await lines(ledger) == ([b"a.jpg"], [b"a.zip"])


async def test_without_unpacking_they_wait_as_images(tmp_path: Path) -> None:
    async with opened(tmp_path, tmp_path) as ledger:
        await drop(ledger, [], [b"a.zip"])
    async with opened(tmp_path, tmp_path, unpacks=False) as ledger:
        assert await lines(ledger) == ([b"a.zip"], [])


async def test_one_can_be_taken_as_an_image(tmp_path: Path) -> None:
    async with opened(tmp_path, tmp_path) as ledger:
        await drop(ledger, [], [b"a.zip", b"b.zip"])
        [job, _] = await ledger.next_jobs(9, (), containers=True)
        await ledger.run(partial(take_as_image, number=job.id))
        await ledger.run(partial(take_as_image, number=job.id))
        assert await lines(ledger) == ([b"a.zip"], [b"b.zip"])


@pytest.mark.parametrize("unpacks", [True, False])
async def test_one_that_is_retried_waits_where_its_inbox_says(tmp_path: Path, unpacks: bool) -> None:
    async with opened(tmp_path, tmp_path) as ledger:
        await drop(ledger, [], [b"a.zip"])
        [job] = await ledger.next_jobs(9, (), containers=True)
        await ledger.end([failed(job)])
        await ledger.mark_emitted([])
        await ledger.run(lambda connection: connection.execute("UPDATE image SET emitted = 1"))
    async with opened(tmp_path, tmp_path, unpacks=unpacks) as ledger:
        assert await ledger.put_back(JobStatus.FAILED, [job.id]) == 1
        assert await lines(ledger) == (([], [b"a.zip"]) if unpacks else ([b"a.zip"], []))


async def test_run_once_waits_for_those_that_are_due_again(tmp_path: Path) -> None:
    async with opened(tmp_path, tmp_path) as ledger:
        await drop(ledger, [b"a.jpg"], [b"a.zip"])
        [job] = await ledger.next_jobs(9, (), containers=True)
        waits = partial(has_containers, inboxes=[1])
        assert await ledger.run(waits)
        await ledger.end([postponed(job, 4e9)])
        assert not await ledger.run(waits)
        await ledger.end([postponed(job, 1.0)])
        assert await ledger.run(waits)
        assert not await ledger.run(partial(has_containers, inboxes=[2]))
