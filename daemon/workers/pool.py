"""The workers of one segment: started, restarted, and lent one thread at a time.

A slot is a position for one worker on a device. When its worker dies, another one is started there, after a pause that grows
with each quick death. A slot whose workers keep dying before they answer anything is closed; when all slots are closed, the
pool fails. Workers that share a GPU by MPS (mps.py) are restarted together: the first loss ends the sharing.

When not even one image fits into a GPU's memory, other programs may have taken it. Then a worker ends, so that those that are
left have more, and its slot waits until there is memory for it again. The last worker stays, and its images wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import anyio
import anyio.abc
import msgspec
import structlog

from daemon.config.pipeline import PipelineSection
from daemon.core.errors import Loss, ModelsUnusable, NoWorkersLeft, WorkerLost
from daemon.core.messages import Item, Ready, Reply
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import WorkerState
from daemon.workers.slot import QUICK_DEATHS, TAKEN_BYTES, Room, Slot, need_for
from daemon.workers.worker import Worker

log = structlog.get_logger()

# The same for workers that ran one image alone, which is then the likely cause; a folder may be full of such images.
LONE_DEATHS = 20
BACKOFF_SECONDS = 0.5  # before the second start in a row; doubles with each further one
LONGEST_BACKOFF_SECONDS = 30.0
FRESH_SECONDS = 2.0  # after which each worker has reported its memory
ATTEMPT_SECONDS = 15.0  # after a pause, for an image to be tried again, and for its worker to answer
REST_SECONDS = 5.0  # before a slot looks for memory again; doubles with each further rest in a row
LONGEST_REST_SECONDS = 60.0
MOST_DOUBLINGS = 10  # of a pause; a thousand would be more than a float holds
SLOWER = 4  # times the slowest batch lately: how long the next one may take, if that is more than configured
FADING = 0.9  # of the slowest batch's time, with each further batch of that size
STEADY_BATCHES = 100  # of a worker, after which its next rest is a first one


class Pool:
    """All workers of a segment. Whoever has reserved a thread may send one batch."""

    def __init__(
        self, name: str, slots: Sequence[Slot], slab_fd: int, settings: PipelineSection, metrics: Metrics
    ) -> None:
        self.name = name
        self.slots = list(slots)
        self._slab_fd = slab_fd
        self._settings = settings
        self._metrics = metrics
        self._free: asyncio.Queue[Worker] = asyncio.Queue()  # each worker once for each of its free threads
        self._slowest = 0.0, 0  # batch that was done lately: its seconds and images
        # How much longer than configured a batch may take: a busy machine has shown that it is slow, not that it hangs.
        self._extra_seconds = 0.0
        self.progressed_at = time.monotonic()  # when a batch last began or ended; later if one may take long
        self._stopping = False
        self._hurried = anyio.Event()  # the images that wait are given up
        self._over = anyio.Event()  # no worker is started any more

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep a worker in every slot until stopped. Reports as started when each slot has a ready worker or is closed.

        Raises NoWorkersLeft when every slot is closed; ModelsUnusable when a stage cannot be built.
        """
        opened = [anyio.Event() for _ in self.slots]
        try:
            async with anyio.create_task_group() as tasks:
                for slot, event in zip(self.slots, opened, strict=True):
                    tasks.start_soon(self._keep_filled, slot, event)
                for event in opened:
                    await event.wait()
                task_status.started()
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as ends:
                    for server in {slot.server for slot in self.slots if slot.server}:
                        ends.start_soon(server.stop)

    async def reserve(self) -> Worker:
        """Wait for a free thread; the one that has been free longest comes first."""
        while True:
            worker = await self._free.get()
            if worker.leaving and worker.alone is None:
                continue
            if worker.alive and worker.alone is None:
                return worker
            if worker.alive:
                self._park(worker)

    def release(self, worker: Worker) -> None:
        """Give a thread back. Threads of a dead worker are dropped."""
        if not worker.alive:
            return
        if worker.alone:
            self._park(worker)
        elif not worker.leaving:
            self._free.put_nowait(worker)

    @contextlib.asynccontextmanager
    async def reserve_whole(self) -> AsyncIterator[Worker]:
        """A worker that runs nothing else, so that its death has only one possible cause."""
        worker = await self.reserve()
        worker.alone = anyio.Event()
        self._park(worker)
        for _ in range(self._free.qsize()):  # its free threads leave the queue
            self.release(self._free.get_nowait())
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
        started, usual = time.monotonic(), self._settings.batch_timeout_seconds
        self.progressed_at = started + 2 * self._extra_seconds  # the watchdog waits for twice the usual time
        try:
            reply = await worker.run(items, usual + self._extra_seconds)
            seconds, (slowest, size) = time.monotonic() - started, self._slowest
            if seconds >= slowest:
                self._slowest = seconds, len(items)
            elif len(items) >= size:  # a smaller one says nothing about those
                self._slowest = max(seconds, FADING * slowest), size
            self._extra_seconds = max(0.0, SLOWER * self._slowest[0] - usual)
            return reply
        finally:
            self.progressed_at = time.monotonic() + 2 * self._extra_seconds

    async def make_room(self, worker: Worker, *, usual: bool) -> bool:
        """A worker's GPU had no memory for one image alone. Returns whether to try that image again: a worker has
        left, or the images wait because others use the memory. If not, the image is too large for this GPU.

        usual: whether it has a usual size; no worker leaves for a huge one. The caller keeps its thread until then.
        """
        slot = self._slot_of(worker)
        if not slot or not slot.room:
            return not slot
        async with slot.room.judging:
            if slot.worker is not worker or worker.leaving or self._hurried.is_set():
                return True
            has_fellows = self._has_healthy_fellows(slot)
            if has_fellows and usual:
                await self._send_away(slot, worker)
                return True
            await self._pause(FRESH_SECONDS)
            taken = await slot.room.measure_taken()
            if taken <= TAKEN_BYTES:
                return False
            pause = slot.room.next_pause()
            if not has_fellows:
                self._note_full(slot, taken, pause)
            await self._pause(pause)
            return True

    def note_fit(self, worker: Worker) -> None:
        """A batch fitted into the memory of this worker's GPU."""
        for slot in self.slots:
            if slot.device == worker.device and slot.full_until and slot.room:
                slot.room.note_fit()
                slot.full_until, slot.last_cause = 0.0, ""
                log.info("images fit into the GPU's memory again", device=slot.device)

    def hurry(self) -> None:
        """Wait for no memory any more: the images that wait are given up."""
        self._hurried.set()

    def stop(self) -> None:
        """Start no more workers. `run` ends when the living ones have exited."""
        self._stopping = True
        self._hurried.set()
        self._over.set()
        for worker in [slot.worker for slot in self.slots if slot.worker]:
            if worker.loaded:
                worker.dismiss()
            else:
                worker.give_up()

    def health(self) -> list[WorkerState]:
        return [slot.describe() for slot in self.slots]

    def _park(self, worker: Worker) -> None:
        worker.parked += 1
        if worker.alone and worker.parked == worker.threads:
            worker.alone.set()

    async def _keep_filled(self, slot: Slot, opened: anyio.Event) -> None:
        """Keep a worker in this slot until the pool stops or the slot is closed."""
        try:
            while not self._stopping and slot.quick_deaths < QUICK_DEATHS and slot.lone_deaths < LONE_DEATHS:
                await self._fill(slot, opened)
        finally:
            slot.state = "closed"
            opened.set()
        if self._stopping:
            return
        why = "a stage cannot be built" if slot.unusable else "its workers keep dying"
        log.error(
            f"worker slot closed: {why}", worker=slot.setup.name, device=slot.device, cause=slot.last_cause
        )
        if all(other.state == "closed" for other in self.slots):
            if slot.unusable:
                raise ModelsUnusable(slot.last_cause)
            raise NoWorkersLeft(f"No worker is left for {self.name}: {slot.last_cause}.")

    def _slot_of(self, worker: Worker) -> Slot | None:
        return next((slot for slot in self.slots if slot.worker is worker), None)

    def _fellows(self, slot: Slot) -> list[Slot]:
        """The other slots of this pool on the same device."""
        return [other for other in self.slots if other.device == slot.device and other is not slot]

    def _has_healthy_fellows(self, slot: Slot) -> bool:
        return any(fellow.healthy for fellow in self._fellows(slot))

    async def _pause(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._hurried.wait()

    async def _send_away(self, slot: Slot, worker: Worker) -> None:
        """End a worker, and wait until the memory that it had is free."""
        log.warning(
            "worker ends, so that the others of its GPU have more memory",
            worker=worker.name,
            device=slot.device,
        )
        worker.leave()
        await worker.ended.wait()

    def _note_full(self, slot: Slot, taken: int, pause: float) -> None:
        others = f"other programs have taken {taken >> 20:,} MiB of the memory of {slot.device}"
        if not slot.full_until:
            log.warning("not even one image fits into the GPU's memory; images wait", cause=others)
        slot.full_until = time.monotonic() + pause + ATTEMPT_SECONDS
        slot.last_cause = f"not even one image fits: {others}"

    async def _has_memory(self, slot: Slot, room: Room) -> bool:
        """Whether there is memory for a worker in this slot."""
        free = await room.measure_free()
        peaks = [other.worker.beat.device_peak_bytes for other in self._fellows(slot) if other.worker]
        need = need_for([slot.peak_bytes, *peaks], room.gpus)  # after the wait: as it is by now
        if free is None or free >= need:
            return True
        slot.last_cause = f"{need >> 20:,} MiB of the GPU's memory must be free for it; {free >> 20:,} are"
        return False

    async def _is_crowded(self, slot: Slot) -> bool:
        """Whether others use this slot's GPU: workers of this pool, or programs that came later."""
        if not slot.room:
            return False
        return self._has_healthy_fellows(slot) or await slot.room.measure_taken() > TAKEN_BYTES

    def _note_rest(self, slot: Slot, worker: Worker) -> None:
        if not worker.left:
            log.warning(
                "worker could not start, as its GPU has too little free memory; it is started later",
                worker=worker.name,
                device=slot.device,
                cause=worker.cause,
            )
        slot.rests = 1 if worker.answered >= STEADY_BATCHES else slot.rests + 1
        slot.short, slot.state, slot.quick_deaths = True, "waiting", 0
        slot.last_cause = "it gave its GPU's memory to the others" if worker.left else worker.cause
        self._metrics.worker_restarts.labels(slot.device, Loss.MEMORY.value).inc()

    async def _fill(self, slot: Slot, opened: anyio.Event) -> None:
        """The life of one worker in a slot; or, where memory is short, one look at what is free. The slots of a GPU
        take turns at that, so that none waits for what another one needs."""
        async with contextlib.AsyncExitStack() as stack:
            if slot.short and slot.room:
                opened.set()  # with fewer workers
                await stack.enter_async_context(slot.room.starting)
                await self._pause(rest_seconds(slot.rests))
                if self._hurried.is_set():
                    await self._over.wait()
                    return
                if not await self._has_memory(slot, slot.room):
                    return
            await self._live(slot, opened, stack)

    async def _live(self, slot: Slot, opened: anyio.Event, until_ready: contextlib.AsyncExitStack) -> None:
        """until_ready: is closed when the worker has loaded, or is lost."""
        if not (worker := await self._start(slot)):
            return
        try:
            if slot.has_stopped_sharing(worker):
                raise WorkerLost(worker.name, "its GPU stopped being shared while it started")
            ready = await worker.load(self._settings.load_timeout_seconds)
            self._welcome(slot, worker, ready)
            opened.set()
            await until_ready.aclose()
            await worker.listen()
        except WorkerLost as loss:
            worker.cause = worker.cause or loss.cause
        finally:
            slot.worker, slot.state = None, "loading"
            followed = slot.has_stopped_sharing(worker)
            with anyio.CancelScope(shield=True):
                await self._end(slot, worker)
        if not self._stopping:
            if worker.left or (worker.out_of_memory and await self._is_crowded(slot)):
                self._note_rest(slot, worker)
            else:
                self._note_loss(slot, worker, followed=followed)

    async def _start(self, slot: Slot) -> Worker | None:
        """A worker, after a pause if the last ones died soon; None if it cannot be started, or the pool stops."""
        if slot.quick_deaths:
            slot.state = "waiting"
            with anyio.move_on_after(backoff_seconds(slot.quick_deaths)):
                await self._over.wait()
        if self._stopping:
            return None
        slot.state = "loading"
        try:
            on_gpu = not slot.device.startswith("cpu")
            setup = msgspec.structs.replace(slot.setup, rehearse=on_gpu or bool(slot.last_cause))
            shared = await slot.server.share() if slot.server else {}
            worker = await Worker.start(setup, slot.device, self._slab_fd, slot.environment | shared)
        except OSError as error:  # too few processes or memory: that passes, so it never closes the slot
            slot.quick_deaths = min(slot.quick_deaths + 1, QUICK_DEATHS - 1)
            slot.last_cause = f"it cannot be started: {error.strerror}"
            log.warning("worker cannot be started", worker=slot.setup.name, error=error.strerror)
            return None
        slot.worker, worker.shared = worker, bool(shared)
        if self._over.is_set():
            worker.give_up()
        return worker

    async def _end(self, slot: Slot, worker: Worker) -> None:
        """End a worker. Those that shared a GPU with it are in an undefined state, so they are restarted,
        and from then on they take turns on the GPU: the next death has a clear cause."""
        slot.peak_bytes = max(slot.peak_bytes, worker.beat.device_peak_bytes)
        async with anyio.create_task_group() as tasks:
            if worker.leaving:
                await worker.kill()
            else:
                tasks.start_soon(worker.kill)
            if self._stopping or worker.left or not slot.server or not slot.server.close():
                return
            log.warning(
                "workers take turns on the GPU from now on, because one that shared it was lost",
                device=slot.device,
            )
            fellows = [other.worker for other in self.slots if other.server is slot.server and other.worker]
            for fellow in fellows:
                fellow.abandon(f"{worker.name}, with which it shared its GPU, was lost")
                tasks.start_soon(fellow.kill)
            tasks.start_soon(slot.server.stop)

    def _welcome(self, slot: Slot, worker: Worker, ready: Ready) -> None:
        slot.state, slot.ready_at, slot.short, slot.full_until = "ready", time.time(), False, 0.0
        for stage, seconds in ready.load_seconds.items():
            self._metrics.model_load_seconds.labels(slot.device, stage).set(seconds)
        log.info(
            "worker ready",
            worker=worker.name,
            device=slot.device,
            pid=worker.process.pid,
            load_seconds={stage: round(seconds, 2) for stage, seconds in ready.load_seconds.items()},
        )
        for _ in range(worker.threads):
            self._free.put_nowait(worker)

    def _note_loss(self, slot: Slot, worker: Worker, *, followed: bool) -> None:
        causes = {Loss.WRONG: worker.wrong, Loss.SHARING: followed, Loss.TIMEOUT: worker.timed_out}
        otherwise = Loss.DIED if worker.loaded else Loss.LOAD
        loss = next((cause for cause, is_so in causes.items() if is_so), otherwise)
        self._metrics.worker_restarts.labels(slot.device, loss.value).inc()
        for stage in worker.wrong:
            self._metrics.canary_failures.labels(slot.device, stage).inc()
        slot.note_loss(worker)


def backoff_seconds(deaths: int) -> float:
    """How long a slot waits before another worker is started there. deaths: in a row."""
    return min(LONGEST_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0 ** (deaths - 1))


def rest_seconds(rests: int) -> float:
    """How long a slot waits before it looks for memory again. rests: in a row."""
    return min(LONGEST_REST_SECONDS, REST_SECONDS * 2.0 ** min(rests - 1, MOST_DOUBLINGS))
