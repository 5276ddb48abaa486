"""Which images a second look hands out together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from msgspec.structs import replace

from daemon.core.jobs import Ending, Job, Placed
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.pipeline import look_coordinator
from daemon.pipeline.executor import Published
from daemon.pipeline.look_coordinator import LookCoordinator
from daemon.pipeline.schedule import Schedule
from tests.makers import MODELS, admit, done

pytestmark = pytest.mark.anyio

OTHER = Model("ocr", "ocr-2", "")
BATCH = 4


class FakeFirstLooks:
    """First looks whose number the test sets."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.schedule, self.in_flight = ledger, Schedule(), 0
        self.asked = 0

    def answering(self) -> set[int]:
        self.asked += 1
        return {1}

    async def find_hidden(self, endings: Iterable[Ending]) -> dict[int, Ending]:
        return {}

    async def note_published(self, group: Published) -> None: ...

    async def pause(self, seconds: float) -> None: ...

    def wake(self) -> None: ...


@pytest.fixture
async def first_looks(ledger: Ledger, inbox: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFirstLooks:
    monkeypatch.setattr(look_coordinator, "GATHER_SECONDS", 3600.0)
    await ledger.register([(inbox, 0)], MODELS, [OTHER])
    ledger.look_names = ["again"]
    return FakeFirstLooks(ledger)


async def open_coordinator(
    first_looks: FakeFirstLooks, rate: float = 0.0, *, gathers: bool = True
) -> LookCoordinator:
    coordinator = LookCoordinator(
        "again", OTHER, BATCH, rate, first_looks.ledger, first_looks.schedule, {1: b"/drop"}, gathers=gathers
    )
    await coordinator.open(first_looks)
    return coordinator


async def finish(first_looks: FakeFirstLooks, *paths: bytes) -> None:
    """End the first looks of these images; they then wait for their second look."""
    jobs = await admit(first_looks.ledger, *paths)
    await first_looks.ledger.end([replace(done(job), looks=("again",)) for job in jobs])
    await first_looks.ledger.mark_emitted([Placed(job.id) for job in jobs])


async def ids(coordinator: LookCoordinator) -> list[int]:
    with anyio.fail_after(30):
        return [job.id for job in await coordinator.next_jobs(None)]


async def take_while(
    coordinator: LookCoordinator, first_looks: FakeFirstLooks, event: Callable[[], object]
) -> list[Job]:
    """The jobs handed out after the event. Before it the coordinator asks the ledger three times and hands out nothing."""
    taken: list[Job] = []

    async def take() -> None:
        taken.extend(await coordinator.next_jobs(None))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take)
            while first_looks.asked < 3 and not taken:
                coordinator.wake()
                await anyio.lowlevel.checkpoint()
            assert not taken
            event()
            coordinator.wake()
    return taken


async def test_without_first_looks_an_image_is_handed_out_at_once(first_looks: FakeFirstLooks) -> None:
    await finish(first_looks, b"a.jpg")
    assert await ids(await open_coordinator(first_looks)) == [1]


async def test_beside_first_looks_a_full_batch_is_handed_out_at_once(first_looks: FakeFirstLooks) -> None:
    first_looks.in_flight = 1
    await finish(first_looks, *(b"%d.jpg" % number for number in range(BATCH + 1)))
    assert await ids(await open_coordinator(first_looks)) == [1, 2, 3, 4, 5]


async def test_a_few_images_do_not_wait_for_others_on_a_device_of_their_own(
    first_looks: FakeFirstLooks,
) -> None:
    first_looks.in_flight = 1
    await finish(first_looks, b"a.jpg")
    assert await ids(await open_coordinator(first_looks, gathers=False)) == [1]


async def test_a_few_images_wait_until_first_looks_have_ended(first_looks: FakeFirstLooks) -> None:
    first_looks.in_flight = 1
    await finish(first_looks, b"a.jpg", b"b.jpg")
    taken = await take_while(
        await open_coordinator(first_looks), first_looks, lambda: setattr(first_looks, "in_flight", 0)
    )
    assert [job.id for job in taken] == [1, 2]


async def test_a_few_images_wait_for_a_limited_time(
    first_looks: FakeFirstLooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_coordinator, "GATHER_SECONDS", 0.2)
    first_looks.in_flight = 1
    await finish(first_looks, b"a.jpg")
    started = time.monotonic()
    assert await ids(await open_coordinator(first_looks)) == [1]
    assert time.monotonic() - started >= 0.2


async def test_with_a_rate_a_batch_is_as_large_as_the_rate_allows_and_the_ledger_is_asked_seldom(
    first_looks: FakeFirstLooks,
) -> None:
    first_looks.in_flight = 1
    await finish(first_looks, *(b"%d.jpg" % number for number in range(2 * BATCH)))
    limited = await open_coordinator(first_looks, rate=2.0)
    assert await ids(limited) == [1, 2]
    assert await ids(limited) == [3, 4]
    assert first_looks.asked <= 6


async def test_a_stop_ends_the_wait(first_looks: FakeFirstLooks) -> None:
    first_looks.in_flight = 1
    await finish(first_looks, b"a.jpg")
    waiting = await open_coordinator(first_looks)
    assert await take_while(waiting, first_looks, waiting.stop) == []
