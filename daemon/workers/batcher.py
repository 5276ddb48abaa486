"""A segment of the placement at work: forms batches, runs them on the segment's workers, and reports what came of them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Protocol, TypeVar

import anyio
import msgspec

from daemon.core.errors import WorkerLost
from daemon.core.jobs import Attempt
from daemon.core.messages import Item, Outcome, Reply
from daemon.monitoring.snapshot import BatcherState
from daemon.workers.pool import Pool
from daemon.workers.worker import Worker
from stages.contract.base import Reason

T = TypeVar("T")

QUEUE_IMAGES = 1024  # that wait for a worker; who feeds more waits
MOST_WAITS = 5  # of an image for its GPU's memory, while others fit into it
# Of an image; a batch of them fits, so an image that is no larger than they are together does.
USUAL_PIXELS = 1280 * 960


class Listener(Protocol):
    """Gets a report of how each batch ended: the executor."""

    async def advance(self, batcher: Batcher, device: str, attempts: Sequence[Attempt], reply: Reply) -> None:
        """A worker has answered."""

    async def try_again(self, batcher: Batcher, attempts: Sequence[Attempt], loss: WorkerLost) -> None:
        """A worker was lost with these images."""

    async def suspect(self, batcher: Batcher, attempt: Attempt, loss: WorkerLost) -> None:
        """A worker was lost that had only this image."""


class Batcher:
    """The stages of a segment, its queue, its workers, and the images that may have killed a worker."""

    def __init__(self, name: str, stages: tuple[str, ...], batch_size: int, pool: Pool) -> None:
        self.name = name
        self.stages = stages
        self.batch_size = batch_size
        self.pool = pool
        self._queue: asyncio.Queue[Attempt] = asyncio.Queue(QUEUE_IMAGES)
        # Never more than is in flight. The last one in is the first one out, so each is settled before the next begins.
        self._suspects: asyncio.Queue[Attempt] = asyncio.LifoQueue()
        # Taken from a queue, but still waiting for a worker, and `empty` can take them out; by id.
        self._held: dict[int, Attempt] = {}
        # A thread is free again before its batch is committed, so that no GPU waits for the disk.
        # This bounds the batches that wait for a commit: as many as are being worked on.
        self._unfinished = anyio.Semaphore(2 * sum(slot.setup.threads for slot in pool.slots))
        # Images in a batch; after one that took too long it begins again at 1, and doubles.
        self._most = batch_size
        self._fitted = 0  # batches of which something fitted into the GPU's memory

    def state(self) -> BatcherState:
        return BatcherState(self.name, self._queue.qsize(), self.pool.health(), self.batch_size)

    async def put(self, attempt: Attempt, *, suspect: bool) -> None:
        """Queue an attempt, waiting for room. suspect: a worker may have died of it, so it runs alone."""
        await (self._suspects if suspect else self._queue).put(attempt)

    def empty(self) -> list[Attempt]:
        """Take out all attempts that wait, and let those that wait for memory come back."""
        self.pool.hurry()
        held, self._held = list(self._held.values()), {}
        return held + drain(self._queue) + drain(self._suspects)

    async def run(self, listener: Listener) -> None:
        """Work until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._isolate, listener)
            while True:
                first = await self._queue.get()
                self._held[first.job.id] = first
                await self._unfinished.acquire()
                worker = await self.pool.reserve()
                attempts = [first] if self._held.pop(first.job.id, None) else []
                attempts += drain(self._queue, self._most - 1)  # as late, and so as full, as possible
                if attempts:
                    tasks.start_soon(self._work, listener, worker, attempts)
                else:
                    self.pool.release(worker)
                    self._unfinished.release()

    async def _work(self, listener: Listener, worker: Worker, attempts: list[Attempt]) -> None:
        loss: WorkerLost | None = None
        again = attempts
        try:
            try:
                reply = await self._ask(worker, attempts)
                if len(attempts) >= self._most:
                    self._most = min(2 * self._most, self.batch_size)
                attempts, reply, again = await self._make_room(listener, worker, attempts, reply)
            finally:
                self.pool.release(worker)
            await listener.advance(self, worker.device, attempts, reply)
            if again:
                loss = _no_room(worker)
        except WorkerLost as error:
            loss = error
            if loss.timed_out:  # perhaps on a busy machine: single images show how slow it is
                self._most = 1
        finally:
            self._unfinished.release()
        if loss:  # only now: it may wait for room in the queue, which `run` empties
            await listener.try_again(self, again, loss)

    async def _isolate(self, listener: Listener) -> None:
        """Run each suspect on a worker that does nothing else, so that only the image that kills workers pays."""
        while True:
            attempt = await self._suspects.get()
            self._held[attempt.job.id] = attempt
            try:
                async with self.pool.reserve_whole() as worker:
                    if not self._held.pop(attempt.job.id, None):
                        continue
                    reply = await self._ask(worker, [attempt])
                    _, reply, again = await self._make_room(listener, worker, [attempt], reply)
                if again:
                    raise _no_room(worker)
            except WorkerLost as loss:
                await listener.suspect(self, attempt, loss)
            else:
                await listener.advance(self, worker.device, [attempt], reply)

    async def _make_room(
        self, listener: Listener, worker: Worker, attempts: list[Attempt], reply: Reply
    ) -> tuple[list[Attempt], Reply, list[Attempt]]:
        """If the GPU had no memory for some images, each alone: make room for them.
        Returns the attempts that are done, their reply, and the attempts to try again."""
        short = [n for n, outcome in enumerate(reply.outcomes) if outcome.reason == Reason.MEMORY]
        if not short or not reply.out_of_memory:
            self._fitted += 1
            self.pool.note_fit(worker)
            return attempts, reply, []
        if done := [n for n in range(len(attempts)) if n not in short]:  # they need not wait
            self._fitted += 1
            await listener.advance(self, worker.device, *_part_of(attempts, reply, done))
            reply = msgspec.structs.replace(reply, runs=[], out_of_memory=0)
        left, rest = _part_of(attempts, reply, short)
        if await self._fits_later(worker, left, rest.outcomes):
            return *_part_of(attempts, reply, []), left
        return left, rest, []

    async def _fits_later(self, worker: Worker, left: Sequence[Attempt], outcomes: Sequence[Outcome]) -> bool:
        """Whether to try images again for which there was no memory."""
        if all(attempt.waits >= MOST_WAITS for attempt in left):  # others have not taken the memory
            return False
        most, fitted = self.batch_size * USUAL_PIXELS, self._fitted
        usual = any(outcome.width * outcome.height <= most for outcome in outcomes)
        fits_later = await self.pool.make_room(worker, usual=usual)
        if not fits_later and not all(attempt.had_room for attempt in left):
            fits_later = True  # others may have left the GPU only now
            for attempt in left:
                attempt.had_room = True
        for attempt in left:
            attempt.waits += self._fitted > fitted
        return fits_later

    async def _ask(self, worker: Worker, attempts: Sequence[Attempt]) -> Reply:
        """One batch on a reserved worker; the pool limits how long it may take. Raises WorkerLost."""
        items, now = [], time.monotonic()
        for attempt in attempts:
            assert attempt.extent is not None
            attempt.sent_at = now
            items.append(Item(*attempt.extent, attempt.content.payloads))
        return await self.pool.run_batch(worker, items)


def _part_of(attempts: Sequence[Attempt], reply: Reply, places: Sequence[int]) -> tuple[list[Attempt], Reply]:
    part = msgspec.structs.replace(reply, outcomes=[reply.outcomes[place] for place in places])
    return [attempts[place] for place in places], part


def drain(queue: asyncio.Queue[T], most: int = sys.maxsize) -> list[T]:
    """The items that are in the queue now, at most this many, without waiting."""
    return [queue.get_nowait() for _ in range(min(most, queue.qsize()))]


def _no_room(worker: Worker) -> WorkerLost:
    return WorkerLost(worker.name, "its GPU had too little free memory", began=False)
