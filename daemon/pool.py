"""The workers of one segment: started, kept alive, lent out a slot at a time.

A seat is a place for a worker on a device; when its worker dies another one is started there, later each time
it happens again. A seat whose workers keep dying before they have done anything is closed; when all are, so is the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import anyio
import anyio.abc
import msgspec
import structlog

from daemon.errors import NoWorkersLeft, WorkerLost
from daemon.messages import LENGTH, Batch, Beat, Farewell, Item, Ready, Reply, Setup, Stop, decode_from_worker, frame
from daemon.metrics import Metrics
from daemon.sections import PipelineSection
from daemon.snapshot import WorkerState

log = structlog.get_logger()

LONGEST_MESSAGE = 256 << 20  # bytes
QUICK_DEATHS = 5  # in a row, of workers that answered nothing: then their seat is closed
LONE_DEATHS = 20  # likewise, each with one image alone in hand, which is then held to be the cause: it may be a folder of such
BACKOFF_SECONDS = 0.5  # before the second start in a row; doubled for each further one
LONGEST_BACKOFF_SECONDS = 30.0
TERM_SECONDS = 2.0  # between SIGTERM and SIGKILL
SILENCE_SECONDS = 10.0  # without a beat a worker no longer counts as healthy


class Worker:
    """One child process and the conversation with it."""

    def __init__(self, setup: Setup, device: str, process: anyio.abc.Process, connection: socket.socket) -> None:
        self.name = setup.name
        self.device = device
        self.slots = setup.threads
        self.process = process
        self.connection = connection
        self.alive = False
        self.loaded = False
        self.answered = 0  # batches
        self.heard_at = time.monotonic()
        self.beat = Beat(0)
        self.cause = ""  # why it went away, where it could say so
        self.timed_out = False
        self.curable = True
        self.died_alone = False  # with the one image that it had been lent whole for
        self.alone: anyio.Event | None = None  # set: lent whole; the event fires when all its slots are in
        self.parked = 0
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        self._writer: asyncio.StreamWriter | None = None  # once it loads
        self._numbers = 0
        self._setup = setup

    @classmethod
    async def start(cls, setup: Setup, device: str, slab_fd: int, environment: Mapping[str, str]) -> Worker:
        """Start the process; it has not loaded anything yet."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "daemon.worker", str(theirs.fileno()), str(slab_fd), str(os.getpid())]
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            process = await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=None,
                stderr=None,
                env={**os.environ, **environment},
                pass_fds=(theirs.fileno(), slab_fd),
            )
            undo.pop_all()
        ours.setblocking(False)
        return cls(setup, device, process, ours)

    async def load(self, timeout_seconds: float) -> Ready:
        """Wait until its models are loaded. Raises WorkerLost."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self.connection)
        self._send(self._setup)
        try:
            with anyio.fail_after(timeout_seconds):
                message = await self._receive()
        except TimeoutError:
            raise WorkerLost(self.name, f"its models were not loaded within {timeout_seconds:g} s") from None
        except (EOFError, OSError):
            raise WorkerLost(self.name, "it died while it loaded its models") from None
        if isinstance(message, Farewell):
            self.curable = message.curable
            raise WorkerLost(self.name, message.cause)
        assert isinstance(message, Ready)
        self.alive = self.loaded = True
        self.heard_at = time.monotonic()
        return message

    async def run(self, items: list[Item], timeout_seconds: float) -> Reply:
        """Have a batch done. Raises WorkerLost when the worker dies on it or takes too long, for which it is killed."""
        if not self.alive:
            raise WorkerLost(self.name, self.cause or "it is gone", began=False)
        self._numbers += 1
        number = self._numbers
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Batch(number, items))
            with anyio.fail_after(timeout_seconds):
                reply: Reply = await future
                return reply
        except TimeoutError:
            self.cause, self.timed_out = f"a batch was not done within {timeout_seconds:g} s", True
            await self.kill()
            raise WorkerLost(self.name, self.cause, timed_out=True) from None
        finally:
            self._pending.pop(number, None)

    async def listen(self) -> None:
        """Take its replies until it goes away; then every batch in its hands raises WorkerLost."""
        try:
            while True:
                message = await self._receive()
                self.heard_at = time.monotonic()
                if isinstance(message, Reply):
                    self.answered += 1
                    future = self._pending.pop(message.id, None)
                    if future and not future.done():
                        future.set_result(message)
                elif isinstance(message, Beat):
                    self.beat = message
                elif isinstance(message, Farewell):
                    self.cause, self.curable = message.cause, message.curable
        except (EOFError, OSError):
            pass
        finally:
            self.alive = False
            if self.alone:
                self.died_alone = self.alone.is_set() and bool(self._pending)
                self.alone.set()
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(WorkerLost(self.name, self.cause or "it died", timed_out=self.timed_out))

    def dismiss(self) -> None:
        """Tell it that no more batches will come: it leaves when those in its hands are done."""
        if self.alive:
            with contextlib.suppress(OSError):
                self._send(Stop())

    async def kill(self) -> None:
        """Give it a moment if it is leaving, else SIGTERM, SIGKILL, and reap."""
        with anyio.CancelScope(shield=True):
            for signum in (signal.SIGTERM, signal.SIGKILL):
                if self.process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        self.process.send_signal(signum)
                    with anyio.move_on_after(TERM_SECONDS):
                        await self.process.wait()
            if self.process.returncode is None:
                log.error("worker cannot be killed; the kernel holds it", worker=self.name, pid=self.process.pid)
            if self._writer:
                self._writer.close()
            self.connection.close()

    def epitaph(self) -> str:
        """Why it is gone, for the log and the metrics' label."""
        status = self.process.returncode
        if self.cause:
            return self.cause
        return f"killed by {signal.Signals(-status).name}" if status and status < 0 else f"exited with status {status}"

    def _send(self, message: Setup | Batch | Stop) -> None:
        assert self._writer is not None
        self._writer.write(frame(message))

    async def _receive(self) -> Ready | Reply | Beat | Farewell:
        try:
            head = await self._reader.readexactly(LENGTH.size)
            length = LENGTH.unpack(head)[0]
            if length > LONGEST_MESSAGE:
                raise msgspec.DecodeError(f"a message of {length} bytes")
            return decode_from_worker(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError as error:
            raise EOFError from error
        except msgspec.MsgspecError as error:
            self.cause = f"it talks nonsense: {error}"
            raise EOFError from error


@dataclass(slots=True)
class Seat:
    """A place for a worker: a device, and what it takes to start one there."""

    setup: Setup
    device: str
    environment: dict[str, str]
    state: str = "loading"  # loading, ready, waiting (to be restarted), closed
    worker: Worker | None = None
    quick_deaths: int = 0
    lone_deaths: int = 0
    last_cause: str = ""

    @property
    def healthy(self) -> bool:
        worker = self.worker
        return self.state == "ready" and worker is not None and time.monotonic() - worker.heard_at < SILENCE_SECONDS


class Pool:
    """All workers of a segment, lent out by the slot: who has reserved one may send one batch."""

    def __init__(self, name: str, seats: Sequence[Seat], slab_fd: int, settings: PipelineSection, metrics: Metrics) -> None:
        self.name = name
        self.seats = list(seats)
        self._slab_fd = slab_fd
        self._settings = settings
        self._metrics = metrics
        self._free: asyncio.Queue[Worker] = asyncio.Queue()  # a worker stands in it once for each free slot
        self._stopping = False

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep every seat filled until stopped. Started when each seat has a worker that is ready, or is closed.

        Raises NoWorkersLeft when no seat is left open.
        """
        opened = [anyio.Event() for _ in self.seats]
        async with anyio.create_task_group() as tasks:
            for seat, event in zip(self.seats, opened, strict=True):
                tasks.start_soon(self._keep_filled, seat, event)
            for event in opened:
                await event.wait()
            task_status.started()

    async def reserve(self) -> Worker:
        """Wait for a free slot, the one free longest first."""
        while True:
            worker = await self._free.get()
            if worker.alive and worker.alone is None:
                return worker
            if worker.alive:
                self._park(worker)

    def release(self, worker: Worker) -> None:
        """Give a slot back; a dead worker's slots die with it."""
        if not worker.alive:
            return
        if worker.alone:
            self._park(worker)
        else:
            self._free.put_nowait(worker)

    @contextlib.asynccontextmanager
    async def reserve_whole(self) -> AsyncIterator[Worker]:
        """A worker that does nothing else meanwhile, so that its death can be laid at one image's door."""
        worker = await self.reserve()
        worker.alone = anyio.Event()
        self._park(worker)
        for other in [self._free.get_nowait() for _ in range(self._free.qsize())]:  # its slots that nobody waits for
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
        """Start no more workers; `run` ends when those that live have left."""
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
            )
            for seat in self.seats
        ]

    def _park(self, worker: Worker) -> None:
        worker.parked += 1
        if worker.alone and worker.parked == worker.slots:
            worker.alone.set()

    async def _keep_filled(self, seat: Seat, opened: anyio.Event) -> None:
        """A worker in this seat, and another one when it dies, until the pool stops or the seat is closed."""
        try:
            while not self._stopping and seat.quick_deaths < QUICK_DEATHS and seat.lone_deaths < LONE_DEATHS:
                await self._fill(seat, opened)
        finally:
            seat.state = "closed"
            opened.set()
        if self._stopping:
            return
        log.error("seat closed: its workers keep dying", worker=seat.setup.name, device=seat.device, cause=seat.last_cause)
        if all(other.state == "closed" for other in self.seats):
            raise NoWorkersLeft(f"No worker is left for {self.name}: {seat.last_cause}.")

    async def _fill(self, seat: Seat, opened: anyio.Event) -> None:
        """One worker's life in a seat."""
        if seat.quick_deaths:
            seat.state = "waiting"
            await anyio.sleep(min(LONGEST_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** (seat.quick_deaths - 1)))
        seat.state = "loading"
        try:
            on_gpu = not seat.device.startswith("cpu")
            setup = msgspec.structs.replace(seat.setup, rehearse=on_gpu or bool(seat.last_cause))
            worker = await Worker.start(setup, seat.device, self._slab_fd, seat.environment)
        except OSError as error:  # no process or memory to be had: that passes, so it never closes the seat
            seat.quick_deaths = min(seat.quick_deaths + 1, QUICK_DEATHS - 1)
            seat.last_cause = f"it cannot be started: {error.strerror}"
            log.warning("worker cannot be started", worker=seat.setup.name, error=error.strerror)
            return
        try:
            ready = await worker.load(self._settings.load_timeout_seconds)
            self._welcome(seat, worker, ready)
            opened.set()
            await worker.listen()
        except WorkerLost as loss:
            worker.cause = worker.cause or loss.cause
        finally:
            seat.worker = None
            with anyio.CancelScope(shield=True):
                await worker.kill()
        if not self._stopping:
            self._mourn(seat, worker)

    def _welcome(self, seat: Seat, worker: Worker, ready: Ready) -> None:
        seat.worker, seat.state = worker, "ready"
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

    def _mourn(self, seat: Seat, worker: Worker) -> None:
        if worker.answered:
            seat.quick_deaths = seat.lone_deaths = 0
        elif worker.died_alone:
            seat.lone_deaths += 1
        else:
            seat.quick_deaths += 1
        if not worker.curable:
            seat.quick_deaths = QUICK_DEATHS
        seat.last_cause = worker.epitaph()
        reason = "timeout" if worker.timed_out else "died" if worker.loaded else "load"
        self._metrics.worker_restarts.labels(seat.device, reason).inc()
        log.warning("worker lost", worker=worker.name, device=seat.device, cause=seat.last_cause)
