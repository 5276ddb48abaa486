"""The workers of one segment: started, restarted, and lent one slot at a time.

A seat is a position for one worker on a device. When its worker dies, another one is started there, after a
pause that grows with each quick death. A seat whose workers keep dying before they answer anything is closed;
when all seats are closed, the pool fails. Workers that share a GPU by MPS (mps.py) are restarted together:
the first loss ends the sharing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import anyio
import anyio.abc
import msgspec
import structlog

from daemon.config.sections import PipelineSection
from daemon.errors import ModelsUnusable, NoWorkersLeft, WorkerLost
from daemon.messages import Item, Ready, Reply, Setup
from daemon.monitoring.metrics import Loss, Metrics
from daemon.monitoring.snapshot import WorkerState
from daemon.workers.mps import Server
from daemon.workers.worker import Worker

log = structlog.get_logger()

QUICK_DEATHS = 5  # in a row, without any answer, before a seat is closed
# The same for workers that ran one image alone, which is then the likely cause; a folder may be full of such
# images.
LONE_DEATHS = 20
BACKOFF_SECONDS = 0.5  # before the second start in a row; doubles with each further one
LONGEST_BACKOFF_SECONDS = 30.0
SILENCE_SECONDS = 10.0  # without a heartbeat, after which a worker counts as silent


@dataclass(slots=True)
class Seat:
    """A position for a worker: a device, and what is needed to start a worker there."""

    setup: Setup
    device: str
    environment: dict[str, str]
    server: Server | None = None  # shares the GPU with other seats
    state: str = "loading"  # loading, ready, waiting (before a restart), closed
    worker: Worker | None = None
    quick_deaths: int = 0
    lone_deaths: int = 0
    last_cause: str = ""
    unusable: bool = False  # its stages cannot be built; last_cause says why

    @property
    def healthy(self) -> bool:
        worker = self.worker
        return (
            self.state == "ready"
            and worker is not None
            and time.monotonic() - worker.heard_at < SILENCE_SECONDS
        )


class Pool:
    """All workers of a segment. Whoever has reserved a slot may send one batch."""

    def __init__(
        self, name: str, seats: Sequence[Seat], slab_fd: int, settings: PipelineSection, metrics: Metrics
    ) -> None:
        self.name = name
        self.seats = list(seats)
        self._slab_fd = slab_fd
        self._settings = settings
        self._metrics = metrics
        self._free: asyncio.Queue[Worker] = asyncio.Queue()  # each worker once for each of its free slots
        self._stopping = False

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep a worker in every seat until stopped. Reports as
        started when each seat has a ready worker or is closed.

        Raises NoWorkersLeft when every seat is closed; ModelsUnusable when a stage cannot be built.
        """
        opened = [anyio.Event() for _ in self.seats]
        try:
            async with anyio.create_task_group() as tasks:
                for seat, event in zip(self.seats, opened, strict=True):
                    tasks.start_soon(self._keep_filled, seat, event)
                for event in opened:
                    await event.wait()
                task_status.started()
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as ends:
                    for server in {seat.server for seat in self.seats if seat.server}:
                        ends.start_soon(server.stop)

    async def reserve(self) -> Worker:
        """Wait for a free slot; the one that has been free longest comes first."""
        while True:
            worker = await self._free.get()
            if worker.alive and worker.alone is None:
                return worker
            if worker.alive:
                self._park(worker)

    def release(self, worker: Worker) -> None:
        """Give a slot back. Slots of a dead worker are dropped."""
        if not worker.alive:
            return
        if worker.alone:
            self._park(worker)
        else:
            self._free.put_nowait(worker)

    @contextlib.asynccontextmanager
    async def reserve_whole(self) -> AsyncIterator[Worker]:
        """A worker that runs nothing else, so that its death has only one possible cause."""
        worker = await self.reserve()
        worker.alone = anyio.Event()
        self._park(worker)
        # Takes the free slots of this worker out of the queue.
        for other in [self._free.get_nowait() for _ in range(self._free.qsize())]:
            self.release(other)
        try:
            await worker.alone.wait()
            yield worker
        finally:
            worker.alone = None
            parked, worker.parked = worker.parked, 0
            for _ in range(parked):
                self.release(worker)

    async def run_batch(self, worker: Worker, items: list[Item]) -> Reply:
        """One batch on a reserved worker. Raises WorkerLost."""
        return await worker.run(items, self._settings.batch_timeout_seconds)

    def stop(self) -> None:
        """Start no more workers. `run` ends when the living ones have exited."""
        self._stopping = True
        for seat in self.seats:
            if seat.worker:
                seat.worker.dismiss()

    def health(self) -> list[WorkerState]:
        return [
            WorkerState(
                name=seat.setup.name,
                device=seat.device,
                state=seat.state if seat.state != "ready" or seat.healthy else "silent",
                batches=seat.worker.answered if seat.worker else 0,
                cause=seat.last_cause,
                shared=seat.worker is not None and seat.worker.shared,
                stages=[spec.name for spec in seat.setup.stages],
                stages_loaded=seat.worker.stages_loaded if seat.worker else [],
            )
            for seat in self.seats
        ]

    def _park(self, worker: Worker) -> None:
        worker.parked += 1
        if worker.alone and worker.parked == worker.slots:
            worker.alone.set()

    async def _keep_filled(self, seat: Seat, opened: anyio.Event) -> None:
        """Keep a worker in this seat until the pool stops or the seat is closed."""
        try:
            while not self._stopping and seat.quick_deaths < QUICK_DEATHS and seat.lone_deaths < LONE_DEATHS:
                await self._fill(seat, opened)
        finally:
            seat.state = "closed"
            opened.set()
        if self._stopping:
            return
        why = "a stage cannot be built" if seat.unusable else "its workers keep dying"
        log.error(f"seat closed: {why}", worker=seat.setup.name, device=seat.device, cause=seat.last_cause)
        if all(other.state == "closed" for other in self.seats):
            if seat.unusable:
                raise ModelsUnusable(seat.last_cause)
            raise NoWorkersLeft(f"No worker is left for {self.name}: {seat.last_cause}.")

    async def _fill(self, seat: Seat, opened: anyio.Event) -> None:
        """The life of one worker in a seat."""
        if seat.quick_deaths:
            seat.state = "waiting"
            await anyio.sleep(min(LONGEST_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** (seat.quick_deaths - 1)))
        seat.state = "loading"
        try:
            on_gpu = not seat.device.startswith("cpu")
            setup = msgspec.structs.replace(seat.setup, rehearse=on_gpu or bool(seat.last_cause))
            shared = await seat.server.share() if seat.server else {}
            worker = await Worker.start(setup, seat.device, self._slab_fd, seat.environment | shared)
        except OSError as error:  # too few processes or memory: that passes, so it never closes the seat
            seat.quick_deaths = min(seat.quick_deaths + 1, QUICK_DEATHS - 1)
            seat.last_cause = f"it cannot be started: {error.strerror}"
            log.warning("worker cannot be started", worker=seat.setup.name, error=error.strerror)
            return
        seat.worker, worker.shared = worker, bool(shared)
        try:
            if seat.server and shared != seat.server.shared:
                raise WorkerLost(worker.name, "its GPU stopped being shared while it started")
            ready = await worker.load(self._settings.load_timeout_seconds)
            self._welcome(seat, worker, ready)
            opened.set()
            await worker.listen()
        except WorkerLost as loss:
            worker.cause = worker.cause or loss.cause
        finally:
            seat.worker, seat.state = None, "loading"
            # Whether another worker of the same GPU was lost first.
            followed = worker.shared and not (seat.server and seat.server.shared)
            with anyio.CancelScope(shield=True):
                await self._end(seat, worker)
        if not self._stopping:
            self._note_loss(seat, worker, followed=followed)

    async def _end(self, seat: Seat, worker: Worker) -> None:
        """End a worker. Those that shared a GPU with it are in an undefined state, so they are restarted,
        and from then on they take turns on the GPU: the next death has a clear cause."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.kill)
            if self._stopping or not seat.server or not seat.server.close():
                return
            log.warning(
                "workers take turns on the GPU from now on, because one that shared it was lost",
                device=seat.device,
            )
            for fellow in [
                other.worker for other in self.seats if other.server is seat.server and other.worker
            ]:
                fellow.abandon(f"{worker.name}, with which it shared its GPU, was lost")
                tasks.start_soon(fellow.kill)
            tasks.start_soon(seat.server.stop)

    def _welcome(self, seat: Seat, worker: Worker, ready: Ready) -> None:
        seat.state = "ready"
        for stage, seconds in ready.load_seconds.items():
            self._metrics.model_load_seconds.labels(seat.device, stage).set(seconds)
        log.info(
            "worker ready",
            worker=worker.name,
            device=seat.device,
            pid=worker.process.pid,
            load_seconds={stage: round(seconds, 2) for stage, seconds in ready.load_seconds.items()},
        )
        for _ in range(worker.slots):
            self._free.put_nowait(worker)

    def _note_loss(self, seat: Seat, worker: Worker, *, followed: bool) -> None:
        if worker.answered or worker.shared:
            seat.quick_deaths = seat.lone_deaths = 0
        elif worker.died_alone:
            seat.lone_deaths += 1
        else:
            seat.quick_deaths += 1
        if not worker.curable and not worker.shared:
            seat.quick_deaths = QUICK_DEATHS
        seat.last_cause, seat.unusable = worker.why_it_ended(), worker.unusable
        loss = Loss.DIED if worker.loaded else Loss.LOAD
        loss = Loss.SHARING if followed else Loss.TIMEOUT if worker.timed_out else loss
        self._metrics.worker_restarts.labels(seat.device, loss.value).inc()
        log.warning("worker lost", worker=worker.name, device=seat.device, cause=seat.last_cause)
