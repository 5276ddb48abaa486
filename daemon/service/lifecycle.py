"""The life of the daemon: start up, work, shut down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial

import anyio
import structlog
from anyio import to_thread

from daemon.config.loading import Config
from daemon.config.reloading import Apply, Reloading
from daemon.config.state import KERNELS
from daemon.core.errors import (
    InboxUnreadable,
    InboxUnwritable,
    Incomplete,
    ResultsUnwritable,
    SinkBehind,
    Unfinished,
    VisiondError,
    exit_status_of,
    leaves,
)
from daemon.core.hints import command, quantity
from daemon.core.jobs import JobStatus
from daemon.layout.layout import Layout
from daemon.maintenance.guard import OpenFiles, guard
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import Snapshot
from daemon.pipeline.coordinator import Pipeline
from daemon.server.keeper import Keeper
from daemon.server.status import Status
from daemon.service.wiring import open_parts
from daemon.system import signals
from daemon.system.children import leave_within
from daemon.system.log import set_up as set_up_log
from daemon.system.retry import Hurried
from daemon.system.systemd import Notifier
from daemon.workers.kernels import compile_for_workers, wants_of

log = structlog.get_logger()

SHOW_SECONDS = 0.25  # between two updates of the progress bar
STATUS_SECONDS = 5.0  # between lines for `systemctl status`
UNWRITABLE_SECONDS = 30.0  # that a run with once waits while results or the ledger cannot be written
LEAVE_SECONDS = 5.0  # for the end itself, when no work is left and no worker is ending any more
# How many batch time-outs may pass without progress before the watchdog is no longer notified
STALL_FACTOR = 2.0

Show = Callable[[Snapshot], None]


class Service:
    """One run of the daemon, in a state folder that it has locked."""

    def __init__(
        self,
        config: Config,
        *,
        once: bool = False,
        limit: int = 0,
        show: Show | None = None,
        read: Callable[[], Config] | None = None,
    ) -> None:
        """read: reads the configuration again; raises ConfigError."""
        self.config = config
        self.once = once
        self.limit = limit  # images, with once; 0: all
        self.show = show
        self._read = read or (lambda: config)
        self.loaded = False  # whether the models are
        self.stopped_by = 0  # the signal
        self.pipeline: Pipeline | None = None  # set once it is open
        self._layouts: list[Layout] = []  # of first and second looks; set once it is open
        self.looks_left = 0  # images that still waited for a second look at the end
        self.url = ""  # of [http], set once it is served
        self.metrics = Metrics()
        self.counts = self.metrics.counts
        self._keeper = keeper = Keeper(config, self.metrics.executors)
        if config.page.listen:
            up = self.metrics.page_up.labels(config.page.listen)
            up.set_function(lambda: float(not keeper.problem))
        self.notifier = Notifier()

    async def run(self) -> None:
        """Start up, work until a signal to stop (with once: until all is done), shut down.
        Raises VisiondError."""
        async with self._open() as (pipeline, status):
            self.pipeline = pipeline
            with signals.listening() as orders:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._obey, tasks, orders, pipeline, status)
                    tasks.start_soon(self._load_models, tasks, pipeline)
                    tasks.start_soon(self._report, pipeline, status)
                    tasks.start_soon(status.watch)
                    tasks.start_soon(self._give_up if self.once else self._keeper.run)
                    files = OpenFiles(pipeline.ledger.path)
                    tasks.start_soon(guard, files, pipeline.ledger, self._rescan_seconds)
                    tasks.start_soon(pipeline.publisher.watch, self._rescan_seconds)
                    if status.upkeep:
                        tasks.start_soon(partial(status.upkeep.run, scheduled=not self.once))
                    # It admits and reads files while the models load.
                    await pipeline.run(once=self.once, limit=self.limit)
                    self.notifier.stopping()
                    left = [await pipeline.retry("ledger", look.count_waiting) for look in pipeline.looks]
                    self.looks_left = sum(left)
                    if not self.once:
                        leave_within(LEAVE_SECONDS)
                    # If the ledger's file is gone, its results are lost: fail.
                    await to_thread.run_sync(files.check)
                    for part in (*pipeline.executors, *pipeline.looks):
                        part.stop()
                    if self.once and status.upkeep and not pipeline.draining:
                        await status.upkeep.forget_at_end()
                    tasks.cancel_scope.cancel()
            if self.show:
                self.show(await status.complete_snapshot(at_end=True))
            if not self.once:
                warn_of_sinks(pipeline)
                log.info(
                    "stopped", ended=self.counts.ended.total(), pending=self.counts.of(JobStatus.PENDING)
                )
            if self.once:
                self._check_complete(pipeline)

    async def _give_up(self) -> None:
        """End `run --once` when nothing could be written for UNWRITABLE_SECONDS. Raises ResultsUnwritable."""
        assert self.pipeline
        since: float | None = None
        while True:
            blocked = self.pipeline.blocked()
            since = None if not blocked else since or anyio.current_time()
            if since and anyio.current_time() - since > UNWRITABLE_SECONDS:
                fix = f"When that is fixed, `{command('run', '--once')}` does the rest."
                raise ResultsUnwritable(f"{'; '.join(blocked)}. {fix}", self.counts.outcomes())
            await anyio.sleep(SHOW_SECONDS)

    def _check_complete(self, pipeline: Pipeline) -> None:
        """Raises InboxUnreadable, InboxUnwritable when some files could not be done, NoWorkersLeft or ModelsUnusable
        when a second look could not, and SinkBehind when only a sink lacks records."""
        try:
            self._check_images(pipeline)
        except Incomplete:
            warn_of_sinks(pipeline)
            raise
        for look in pipeline.looks:
            if look.failure:
                raise look.failure
        if problems := pipeline.outbox.problems():
            fix = f"All results and sidecars are written. When that is fixed, `{command('run', '--once')}` delivers the rest."
            raise SinkBehind(f"{'; '.join(problems)}. {fix}", self.counts.outcomes())

    def check_finished(self, outcomes: Counter[JobStatus]) -> None:
        """Raises Unfinished if a signal came before all was done."""
        pending = outcomes[JobStatus.PENDING]
        found_all = self.pipeline is not None and self.pipeline.schedule.found_all
        if pending or self.looks_left or not found_all:
            left = "1 image is still pending" if pending == 1 else f"{pending:,} images are still pending"
            left += f", {quantity(self.looks_left, 'second look')} not done" if self.looks_left else ""
            left += "" if found_all else ", and not every file was found"
            text = f"Stopped: {left}; `{command('run', '--once')}` does the rest."
            raise Unfinished(text, outcomes, self.stopped_by)

    def _check_images(self, pipeline: Pipeline) -> None:
        """Raises InboxUnreadable, InboxUnwritable."""
        if problems := pipeline.watcher.held_back() + pipeline.unreadable():
            raise InboxUnreadable(
                f"Not every file was found and read: {'; '.join(problems)}.", self.counts.outcomes()
            )
        if unread := pipeline.watcher.unread():
            lines = [f"{folders.summary()}: {'; '.join(folders.lines(3))}" for folders in unread]
            text = f"Not every file was found: {' | '.join(lines)}. `{command('check')}` lists them."
            raise InboxUnreadable(text, self.counts.outcomes())
        if problems := pipeline.publisher.held_back():
            fix = f"Its result is stored. When that is fixed, `{command('run', '--once')}` does the rest."
            raise InboxUnwritable(f"{'; '.join(problems)}. {fix}", self.counts.outcomes())

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[tuple[Pipeline, Status]]:
        """Open everything, in order of dependence, and serve; close it in the opposite order."""
        with contextlib.ExitStack() as stack:
            parts = await open_parts(
                stack, self.config, self.metrics, once=self.once, page_problem=lambda: self._keeper.problem
            )
            self._layouts, answers, status = parts.layouts, parts.answers, parts.status
            live: list[Apply] = [
                answers.configure,
                partial(self._apply, parts.pipeline),
                parts.upkeep.configure,
            ]
            status.follow_reloads(Reloading(self.config, self._read, live))
            async with answers.serve(self.config, pages_matter=not self.once) as self.url:
                yield parts.pipeline, status

    def _rescan_seconds(self) -> float:
        return self.config.pipeline.rescan_seconds

    def _apply(self, pipeline: Pipeline, config: Config) -> None:
        """Use the new settings after a reload."""
        self.config = config
        set_up_log(config.log.level, config.log.format)
        for executor in pipeline.executors:
            executor.log_at(config.log.level)
        for look in pipeline.looks:
            [rate] = [t.images_per_second for t in config.second_look if t.name == look.coordinator.name]
            look.coordinator.limit(rate)
        pipeline.watcher.configure(config.inbox, config.pipeline.rescan_seconds)

    async def _load_models(self, tasks: anyio.abc.TaskGroup, pipeline: Pipeline) -> None:
        """Start all workers at once, and report READY when all have loaded their models."""
        await tasks.start(compile_for_workers, self.config.state.path / KERNELS, wants_of(self._layouts))
        for look in pipeline.looks:  # first looks do not wait for its model
            tasks.start_soon(look.staff)
        async with anyio.create_task_group() as starting:
            for executor in pipeline.executors:
                starting.start_soon(tasks.start, executor.staff)
        self.loaded = True
        self.notifier.ready()
        workers = sum(len(batcher.workers) for state in pipeline.states() for batcher in state.batchers)
        log.info("ready", workers=workers, once=self.once, metrics=self.url, page=self._keeper.url)

    async def _obey(
        self,
        tasks: anyio.abc.TaskGroup,
        orders: asyncio.Queue[signal.Signals],
        pipeline: Pipeline,
        status: Status,
    ) -> None:
        """The first signal drains. The second one, or the end of drain_seconds, stops at once.
        A SIGHUP does not drain but reloads, unless it comes from a terminal."""
        while (order := await orders.get()) == signal.SIGHUP and signals.is_reload(once=self.once):
            assert status.reloading is not None
            tasks.start_soon(status.reloading.reload)  # the file's disk may hang, and a stop must not wait
        self.stopped_by = order
        log.info("draining", signal=order.name, in_flight=pipeline.in_flight)
        self.notifier.stopping()
        if status.upkeep:
            status.upkeep.leave()
        if self.loaded:  # if not, the images in flight wait for models that never come
            pipeline.drain(self.config.pipeline.drain_seconds)
            with anyio.move_on_after(self.config.pipeline.drain_seconds):
                # A closed terminal sends two SIGHUPs: one from the shell, one from the kernel.
                while await orders.get() == signal.SIGHUP:
                    pass
        leave_within(LEAVE_SECONDS, signals.SHELL_OFFSET + order if self.once else os.EX_OK)
        raise Hurried

    async def _report(self, pipeline: Pipeline, status: Status) -> None:
        """Notify the watchdog while there is progress, and show the state in `systemctl status`."""
        longest = SHOW_SECONDS if self.show else STATUS_SECONDS
        interval = min(longest, (self.notifier.watchdog_seconds or longest) / 3)
        while True:
            snapshot = status.snapshot()
            if not self._is_stalled(pipeline, status):
                self.notifier.alive()
            else:
                self.metrics.watchdog_missed.inc()
            self.notifier.status(snapshot.sentence())
            if self.show:
                self.show(snapshot)
            await anyio.sleep(interval)

    def _is_stalled(self, pipeline: Pipeline, status: Status) -> bool:
        """Whether images are in flight, nothing blocks them, and still there was no progress for too long."""
        patience = STALL_FACTOR * self.config.pipeline.batch_timeout_seconds
        idle = not pipeline.in_flight or status.blocked()
        return not idle and time.monotonic() - pipeline.progressed_at > patience


async def run_service(
    config: Config,
    *,
    once: bool = False,
    limit: int = 0,
    show: Show | None = None,
    ends_process: bool = False,
    read: Callable[[], Config] | None = None,
) -> Counter[JobStatus]:
    """Run the daemon. Returns the number of images that reached each state in this run, and of those that are PENDING.

    ends_process: after an error the process ends soon, even if a thread of it hangs, as one of a sink on a dead mount.
    read: reads the configuration again. Raises VisiondError, taken out of the groups that task groups put errors in."""
    service = Service(config, once=once, limit=limit, show=show, read=read)
    try:
        await _run_to_its_end(service)
    except Exception as error:
        if ends_process:
            leave_within(LEAVE_SECONDS, exit_status_of(error), str(error))
        raise
    outcomes = service.counts.outcomes()
    if once and service.stopped_by:
        service.check_finished(outcomes)
    return outcomes


async def _run_to_its_end(service: Service) -> None:
    """Raises VisiondError."""
    try:
        await service.run()
    except BaseExceptionGroup as group:
        _, rest = group.split(Hurried)
        if rest is not None:
            error = next(leaves(rest))
            raise error from (None if isinstance(error, VisiondError) else group)
        log.warning("stopped before the drain was finished; images in flight stay pending")


def warn_of_sinks(pipeline: Pipeline) -> None:
    """Log which sinks lack records at the end."""
    for problem in pipeline.outbox.problems():
        log.warning("stopped before a sink had all records; the next start delivers the rest", why=problem)
