"""A segment at work, with a fake pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from daemon.config.pipeline import PipelineSection
from daemon.core.errors import WorkerLost
from daemon.core.jobs import Attempt, Extent
from daemon.core.messages import Item, Outcome, Reply
from daemon.monitoring.metrics import Metrics
from daemon.workers import pool
from daemon.workers.batcher import Batcher, drain
from tests.daemon_process import PATIENCE
from tests.makers import make_attempt, make_job

pytestmark = pytest.mark.anyio

REPLY = Reply(0, [Outcome("JPEG", 8, 8, {})], [])


class FakePool:
    """One worker with one or more threads. `lost`: the number of batches of which it dies;
    a new worker is there at once."""

    def __init__(self, threads: int = 1, lost: int = 0) -> None:
        self.slots = [SimpleNamespace(setup=SimpleNamespace(threads=threads))]
        self.batches: list[int] = []  # how many images each one had
        self._lost = lost
        self._threads = anyio.Semaphore(threads)

    async def reserve(self) -> Any:
        await self._threads.acquire()
        return SimpleNamespace(device="cpu", name="w")

    def release(self, worker: Any) -> None:
        self._threads.release()

    def hurry(self) -> None:
        """Nothing waits for memory."""

    def note_fit(self, worker: Any) -> None:
        """Nothing waits for memory."""

    @contextlib.asynccontextmanager
    async def reserve_whole(self) -> AsyncIterator[Any]:
        worker = await self.reserve()
        try:
            yield worker
        finally:
            self.release(worker)

    async def run_batch(self, worker: Any, items: list[Item]) -> Reply:
        self.batches.append(len(items))
        await anyio.lowlevel.checkpoint()
        if len(self.batches) <= self._lost:
            raise WorkerLost("w", "it died", began=False)
        return REPLY


class SlowWorker:
    """A worker that is as slow as the test says, by a clock of its own."""

    device, name, threads = "cpu", "w", 1
    alive, leaving = True, False

    def __init__(self) -> None:
        self.seconds = 1.0  # for each image
        self.now = 0.0
        self.batches: list[int] = []  # how many images each one had
        self.lost = 0
        self.parked = 0
        self.alone: anyio.Event | None = None

    async def run(self, items: list[Item], limit: float) -> Reply:
        self.batches.append(len(items))
        await anyio.lowlevel.checkpoint()
        self.now += min(limit, len(items) * self.seconds)
        if len(items) * self.seconds > limit:
            self.lost += 1
            raise WorkerLost("w", "a batch was not done", timed_out=True)
        return REPLY


class FakePipeline:
    """Commits answers when the test says so, and queues lost images again."""

    def __init__(self, committing: anyio.Event | None = None) -> None:
        self._committing = committing
        self.done = 0

    async def advance(self, batcher: Batcher, device: str, attempts: Sequence[Attempt], reply: Reply) -> None:
        if self._committing:
            await self._committing.wait()
        self.done += len(attempts)

    async def try_again(self, batcher: Batcher, attempts: Sequence[Attempt], loss: WorkerLost) -> None:
        for attempt in attempts:
            await batcher.put(attempt, suspect=loss.began)

    async def suspect(self, batcher: Batcher, attempt: Attempt, loss: WorkerLost) -> None:
        raise AssertionError


def open_batcher(pool: FakePool | pool.Pool, *, batch_size: int = 1) -> Batcher:
    return Batcher("w", ("ocr",), batch_size, cast(Any, pool))


async def fill(batcher: Batcher, images: int) -> None:
    for number in range(images):
        await batcher.put(make_attempt(make_job(id=number), extent=Extent(0, 1)), suspect=False)


async def until(condition: Callable[..., bool]) -> None:
    with anyio.fail_after(PATIENCE):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def settle() -> None:
    """Wait until no task can continue by itself."""
    await anyio.wait_all_tasks_blocked()


@contextlib.asynccontextmanager
async def running(batcher: Batcher, pipeline: FakePipeline) -> AsyncIterator[anyio.abc.TaskGroup]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(batcher.run, pipeline)
        yield tasks
        tasks.cancel_scope.cancel()


async def test_a_batch_takes_what_waits_when_a_slot_is_free() -> None:
    pool, pipeline = FakePool(), FakePipeline()
    batcher = open_batcher(pool, batch_size=3)
    await fill(batcher, 5)
    async with running(batcher, pipeline):
        await until(lambda: pipeline.done == 5)
    assert pool.batches == [3, 2]


async def test_no_batch_waits_to_be_filled() -> None:
    """Nothing passes the time here, so a batcher that waits for more images would send none."""
    pool, pipeline = FakePool(), FakePipeline()
    batcher = open_batcher(pool, batch_size=8)
    async with running(batcher, pipeline):
        for images in range(1, 4):
            await fill(batcher, 1)
            await settle()
            assert pool.batches == [1] * images


@pytest.mark.parametrize("drop", [5, 50, 100])
async def test_after_a_batch_that_took_too_long_batches_begin_small_and_grow_again(
    drop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, pipeline = SlowWorker(), FakePipeline()
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: worker.now))
    slot = SimpleNamespace(setup=SimpleNamespace(threads=1), device="cpu", full_until=0.0)
    settings = PipelineSection(batch_timeout_seconds=100.0)
    workers = pool.Pool("w", cast(Any, [slot]), 0, settings, Metrics())
    workers.release(cast(Any, worker))
    batcher = open_batcher(workers, batch_size=32)
    async with running(batcher, pipeline):
        for total, seconds in ((64, 1.0), (264, drop), (270, drop), (334, drop)):
            worker.seconds = seconds
            await fill(batcher, total - pipeline.done)
            await until(lambda total=total: pipeline.done == total)
        assert (worker.lost, worker.batches[-2:]) == (1, [32, 32])
        patience = 2 * settings.batch_timeout_seconds
        assert workers.progressed_at + patience > worker.now + 32 * drop, "the watchdog waits as long"


async def test_a_slot_is_free_again_before_its_batch_is_committed() -> None:
    pool, pipeline = FakePool(), FakePipeline(committing=anyio.Event())
    batcher = open_batcher(pool)
    await fill(batcher, 2)
    async with running(batcher, pipeline):
        await settle()
        assert pool.batches == [1, 1]
        assert pipeline.done == 0


async def test_no_more_batches_wait_for_their_commit_than_are_worked_on() -> None:
    committing = anyio.Event()
    pool, pipeline = FakePool(threads=2), FakePipeline(committing)
    batcher = open_batcher(pool)
    await fill(batcher, 10)
    async with running(batcher, pipeline):
        await settle()
        assert len(pool.batches) == 4
        committing.set()
        await until(lambda: pipeline.done == 10)


async def test_lost_batches_that_find_the_queue_full_do_not_stop_the_batcher_that_empties_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("daemon.workers.batcher.QUEUE_IMAGES", 1)
    pool, pipeline = FakePool(lost=8), FakePipeline()
    batcher = open_batcher(pool)
    async with running(batcher, pipeline) as tasks:
        tasks.start_soon(fill, batcher, 10)
        await until(lambda: pipeline.done == 10)


async def test_images_that_wait_for_a_worker_can_be_taken_back_and_do_not_run_later() -> None:
    pool, pipeline = FakePool(), FakePipeline()
    batcher = open_batcher(pool, batch_size=2)
    async with running(batcher, pipeline):
        for _ in range(3):
            worker = await pool.reserve()
            for number in range(6):
                await batcher.put(make_attempt(make_job(id=number), extent=Extent(0, 1)), suspect=number > 3)
            await settle()
            assert sorted(each.job.id for each in batcher.empty()) == list(range(6))
            pool.release(worker)
            await settle()
            assert (pool.batches, batcher.empty()) == ([], [])
        await fill(batcher, 3)  # the batcher works on
        await until(lambda: pipeline.done == 3)


class FullPool(FakePool):
    """Its GPU has no memory for images of some width, until it was asked to make room.
    rooms: whether for an image of usual size."""

    def __init__(self, too_wide: int, *, widths: Sequence[int]) -> None:
        super().__init__()
        self.rooms: list[bool] = []
        self._too_wide = too_wide
        self._widths = list(widths)

    async def run_batch(self, worker: Any, items: list[Item]) -> Reply:
        self.batches.append(len(items))
        await anyio.lowlevel.checkpoint()
        widths = [self._widths[item.offset] for item in items]
        full = [not any(self.rooms) and width >= self._too_wide for width in widths]
        outcomes = [
            Outcome("JPEG", width, 1000, {}, "memory" if each else "")
            for width, each in zip(widths, full, strict=True)
        ]
        return Reply(0, outcomes, [], out_of_memory=sum(full))

    async def make_room(self, worker: Any, *, usual: bool) -> bool:
        self.rooms.append(usual)
        return usual


@pytest.mark.parametrize(
    ("widths", "rooms", "failed"),
    [
        ([1000, 3000, 1000], [True], []),
        # More pixels than a batch of usual images
        ([1000, 1_000_000, 1000], [False, False], [1_000_000]),
        ([1000, 1_000_000, 3000], [True], []),
    ],
)
async def test_images_without_memory_are_tried_again_when_there_is_room(
    widths: list[int], rooms: list[bool], failed: list[int]
) -> None:
    pool, told = FullPool(too_wide=2000, widths=widths), list[Outcome]()

    class Noting(FakePipeline):
        async def advance(
            self, batcher: Batcher, device: str, attempts: Sequence[Attempt], reply: Reply
        ) -> None:
            assert len(attempts) == len(reply.outcomes)
            told.extend(reply.outcomes)
            await super().advance(batcher, device, attempts, reply)

    pipeline, batcher = Noting(), open_batcher(pool, batch_size=3)
    for number in range(len(widths)):
        await batcher.put(make_attempt(make_job(id=number), extent=Extent(number, 1)), suspect=False)
    async with running(batcher, pipeline):
        await until(lambda: pipeline.done == len(widths))
    assert (pool.rooms, [outcome.width for outcome in told if outcome.reason]) == (rooms, failed)
    assert sorted(outcome.width for outcome in told) == sorted(widths)


@pytest.mark.anyio
async def test_a_batch_is_what_is_there_and_no_more_than_asked_for() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    for number in range(5):
        queue.put_nowait(number)
    assert drain(queue, 2) == [0, 1]
    assert drain(queue) == [2, 3, 4]
    assert drain(queue) == []
