"""The coordinator's side of an executor in another process; the process itself runs child.py.

An executor that dies, or reports nothing for too long, is replaced. Its jobs are handed out again, unless their
endings were committed: those are published by the daemon itself, as after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.abc
import msgspec
import structlog

from daemon.core.errors import ModelsUnusable, NoWorkersLeft
from daemon.core.jobs import Ending, list_published
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import BatcherState, ExecutorState, WorkerState
from daemon.pipeline import executor, wire
from daemon.pipeline.executor import Published
from daemon.pipeline.schedule import Schedule
from daemon.results.destinations import Publication
from daemon.system import children
from daemon.system.printed import ChildLog
from daemon.system.retry import Hurried
from stages.contract import processes

if TYPE_CHECKING:
    from daemon.ledger.record import Record

log = structlog.get_logger()

SILENCE_SECONDS = 30.0  # without a report, after which an executor is replaced
START_SECONDS = 120.0  # the same, before the first report
QUICK_LOSSES = 5  # in a row, without a published image, before an executor is closed
STEADY_SECONDS = 60.0  # of work, after which earlier losses no longer count
BACKOFF_SECONDS = 0.5  # before the second start in a row; doubles with each further one
STATUS_SECONDS = 5.0  # to wait for the exit status after the connection was closed
OUTPUT_SECONDS = 0.5  # after its end, to read what it printed
LEAVE_SECONDS = 5.0 + children.END_SECONDS  # for an executor to end its workers, after it was told to stop


class RemoteJobSource(executor.JobSource, Protocol):
    """What a RemoteExecutor needs from the coordinator. bins: those that images got in this run."""

    schedule: Schedule

    @property
    def bins(self) -> Mapping[str, None]: ...

    @property
    def has_sinks(self) -> bool: ...

    def record_of(self, ending: Ending) -> Record:
        """Of one that `end` has committed."""

    def lose(self, executor: object) -> int:
        """The executor is gone, with the jobs that it had. Returns how many these were."""


class RemoteExecutor:
    """An executor in a process of its own, as the daemon sees it."""

    def __init__(
        self, setup: wire.ExecutorSetup, metrics: Metrics, siblings: Sequence[RemoteExecutor] = ()
    ) -> None:
        """siblings: all executors of this daemon, which fails when none of them is left."""
        self.name = setup.name
        self._setup = setup
        self._metrics = metrics
        self._siblings = siblings
        self._coordinator: RemoteJobSource | None = None
        self._begun, self._stopped = anyio.Event(), anyio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._process: anyio.abc.Process | None = None
        self._draining = self._stopping = self.closed = False
        self._losses = self._bins_sent = 0
        self._started_at = self._heard_at = 0.0  # monotonic seconds
        self._cause = ""
        self._state = self._loading_state()

    # What the pipeline and the service do with an executor.

    async def run(self, coordinator: RemoteJobSource) -> None:
        """Work until cancelled."""
        self._coordinator = coordinator
        self._begun.set()
        await anyio.sleep_forever()

    def log_at(self, level: str) -> None:
        """The lowest level that it logs from now on, and after it was replaced."""
        config = msgspec.json.decode(self._setup.config)
        config["log"]["level"] = level
        self._setup = msgspec.structs.replace(self._setup, config=msgspec.json.encode(config))
        self._send(wire.LogLevel(level))

    def drain(self) -> None:
        self._draining = True
        self._send(wire.Drain())

    def stop(self) -> None:
        self._stopping = True
        self._stopped.set()
        self._send(wire.ExecutorStop())
        if self._process and not self._has_reported():
            children.kill(self._process)  # It still starts, and would not read that for a while.

    def state(self) -> ExecutorState:
        return self._state

    def measure(self) -> None:
        """It reports its gauges by itself."""

    async def staff(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the process running until `stop`. Reports as started when its workers have loaded their models.
        Raises ModelsUnusable, NoWorkersLeft, Hurried."""
        staffed = False

        def note_staffed() -> None:
            nonlocal staffed
            if not staffed:
                staffed = True
                task_status.started()

        while not self._stopping and self._losses < QUICK_LOSSES:
            if self._losses:
                with anyio.move_on_after(BACKOFF_SECONDS * 2 ** (self._losses - 1)):
                    await self._stopped.wait()
            if self._stopped.is_set():
                break
            self._losses += 1  # until it has published something, or has worked for STEADY_SECONDS
            self._started_at, self._bins_sent = time.monotonic(), 0
            try:
                await self._live(note_staffed)
            except OSError as error:  # too few processes or memory
                self._cause = f"it cannot be started: {error.strerror}"
            finally:
                self._metrics.executors.keep(self)
                self._state = self._loading_state()
            if not self._stopping:
                images = self._coordinator.lose(self) if self._coordinator else 0
                log.warning("executor lost", executor=self.name, cause=self._cause, images=images)
        if self._stopping:
            return
        self.closed = True
        self._state = self._loading_state("closed")
        log.error("executor closed: its processes keep dying", executor=self.name, cause=self._cause)
        note_staffed()
        if all(sibling.closed for sibling in self._siblings):
            raise NoWorkersLeft(f"No executor is left: {self._cause}.")

    # The life of one process.

    async def _live(self, note_staffed: Callable[[], None]) -> None:
        child = await children.start("daemon.pipeline.child", ChildLog(self.name))
        process = self._process = child.process
        reader, writer = await asyncio.open_unix_connection(sock=child.connection)
        self._cause, self._writer = "", writer
        if self._stopped.is_set():
            children.kill(process)
        try:
            self._send(self._setup)
            # A call that commits something runs to its end, even if the executor dies meanwhile.
            async with anyio.create_task_group() as calls, anyio.create_task_group() as watches:
                watches.start_soon(self._end_silence, process)
                while message := await self._next_message(reader):
                    if isinstance(message, wire.Staffed):
                        note_staffed()
                    elif isinstance(message, wire.NextJobs):
                        watches.start_soon(self._hand_out, message)
                    else:
                        self._take(message, calls)
                watches.cancel_scope.cancel()
        finally:
            self._writer = self._process = None
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(LEAVE_SECONDS if self._stopping else STATUS_SECONDS):
                    await process.wait()
                if process.returncode is None:  # Its status will only be that of our signal.
                    self._cause = self._cause or "it closed its connection and did not exit"
                await children.end(process)
                await child.printed.finish(OUTPUT_SECONDS)
            writer.close()
            self._cause = self._cause or processes.describe_end(process.returncode or 0)

    async def _end_silence(self, process: anyio.abc.Process) -> None:
        """Kill the process when it has reported nothing for too long."""
        while True:
            patience = SILENCE_SECONDS if self._has_reported() else START_SECONDS
            now = time.monotonic()
            left = max(self._heard_at, self._started_at) + patience - now
            if left <= 0:
                break
            await anyio.sleep(pause := min(left, SILENCE_SECONDS))
            if time.monotonic() - now > pause + SILENCE_SECONDS / 2:
                self._heard_at = time.monotonic()  # This process was stopped itself: its reports wait.
        self._cause = f"it reported nothing for {patience:g} s"
        children.kill(process)

    async def _next_message(self, reader: asyncio.StreamReader) -> wire.FromExecutor | None:
        """None when it is gone. Raises the error that it reported."""
        try:
            message = wire.decode_from_executor(await wire.receive(reader))
        except EOFError:
            return None
        except msgspec.MsgspecError as error:
            self._cause = f"it sent an invalid message: {error}"
            return None
        if isinstance(message, wire.ExecutorFarewell):
            if message.error == ModelsUnusable.__name__:
                raise ModelsUnusable(message.text)
            if message.error == Hurried.__name__:
                raise Hurried
            self._cause = message.text
            if message.error == NoWorkersLeft.__name__:
                self._losses = QUICK_LOSSES  # its workers were started often enough
            return None
        return message

    def _take(self, message: wire.FromExecutor, tasks: anyio.abc.TaskGroup) -> None:
        match message:
            case wire.ExecutorReport(state, samples):
                self._state, self._heard_at = state, time.monotonic()
                if self._heard_at - self._started_at > STEADY_SECONDS:
                    self._losses = 0
                self._metrics.executors.take(self, samples)
            case wire.LetGo(images):
                self._of_pipeline().let_go(images)
            case wire.NoteRead():
                tasks.start_soon(self._note_read, message)
            case wire.Keep():
                tasks.start_soon(self._keep, message)
            case wire.Blame():
                tasks.start_soon(self._blame, message)
            case wire.End():
                tasks.start_soon(self._end, message)
            case wire.NotePublished():
                tasks.start_soon(self._note_published, message)

    # Its calls to the coordinator.

    async def _hand_out(self, call: wire.NextJobs) -> None:
        await self._begun.wait()
        jobs = await self._of_pipeline().next_jobs(self)
        bins = list(self._of_pipeline().bins)
        self._send(wire.Jobs(call.number, jobs, bins[self._bins_sent :]))
        self._bins_sent = len(bins)
        if self._draining:
            self._send(wire.Drain())

    async def _note_read(self, call: wire.NoteRead) -> None:
        self._send(wire.Known(call.number, dict(await self._of_pipeline().note_read(call.read))))

    async def _keep(self, call: wire.Keep) -> None:
        await self._of_pipeline().keep(call.contents)
        self._send(wire.Done(call.number))

    async def _blame(self, call: wire.Blame) -> None:
        await self._of_pipeline().blame(call.image, call.deaths)
        self._send(wire.Done(call.number))

    async def _end(self, call: wire.End) -> None:
        endings, newest, _ = await self._of_pipeline().end(call.endings)
        changed = [now for now, said in zip(endings, call.endings, strict=True) if now is not said]
        self._send(wire.Ended(call.number, newest, changed))

    async def _note_published(self, call: wire.NotePublished) -> None:
        self._losses = 0
        coordinator = self._of_pipeline()
        endings = [ending for image in call.images if (ending := coordinator.schedule.entries[image].ending)]
        published = list_published(endings, call.newest) if coordinator.has_sinks else []
        records = [coordinator.record_of(ending) for ending in published]
        publication = Publication(call.placed, call.held, set(call.folders), records, call.begun_at)
        await coordinator.note_published(Published(endings, call.newest, publication))
        self._send(wire.Done(call.number))

    def _has_reported(self) -> bool:
        return self._heard_at > self._started_at

    def _of_pipeline(self) -> RemoteJobSource:
        assert self._coordinator is not None
        return self._coordinator

    def _send(self, message: wire.ToExecutor) -> None:
        """What an executor that is gone does not get is lost with it."""
        if self._writer:
            with contextlib.suppress(EOFError):
                wire.send(self._writer, message)

    def _loading_state(self, state: str = "loading") -> ExecutorState:
        """What is known while there is no report."""
        batchers = []
        for (stages, devices), numbers in zip(self._setup.segments, self._setup.workers, strict=True):
            name = "+".join(stages)
            workers = [
                WorkerState(f"{name}/{number}", devices[number], state, 0, self._cause, stages=stages)
                for number in numbers
            ]
            batchers.append(BatcherState(name, 0, workers))
        size = self._setup.slab_bytes
        return ExecutorState(batchers=batchers, slab_used=0, slab_size=size, progressed_at=time.monotonic())
