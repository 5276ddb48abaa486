"""Scheduled tasks that keep the ledger in good order over the years: a full check, backups and their uploads, forgetting
skipped files that are gone, pruning, shrinking the file.

A task starts in the configured quiet hours when no image is in flight, one at a time. None delays incoming images: check and
backup read over separate connections, forgetting and pruning take small steps, and shrinking the file stops when images or a
command (redo, retry, prune) come. A task that fails is logged, counted and tried again an hour later; work goes on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import msgspec
import structlog
from anyio import to_thread

from daemon.config.loading import Config
from daemon.core.jobs import JobStatus
from daemon.ledger.ledger import Ledger
from daemon.ledger.reading import Stopped
from daemon.maintenance.background import run_in_background
from daemon.maintenance.backups import back_up_into, upload_backups
from daemon.maintenance.comparing import check_ledger, check_some
from daemon.maintenance.forgetting import Folders, are_scanned, forget_skipped
from daemon.maintenance.pruning import Amounts, prune, shrink
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import TASKS, UpkeepRun
from daemon.monitoring.upkeep import read_upkeep, write_upkeep
from daemon.system.mounts import KnownFolder

log = structlog.get_logger()

DAY_SECONDS = 86_400.0
POLL_SECONDS = 5.0  # between two checks whether a task is due
AGAIN_SECONDS = {"failed": 3600.0, "stopped": 600.0}  # until the next try
EARLY = 0.05  # of its interval a task may begin, so that a daily one keeps its hour
SHARES = 10  # of the sidecars, one of which is compared at each check
# `run --once` forgets skipped files each time; if that took t seconds, which are more than these, only after REST × t.
QUICK_SECONDS, REST = 1.0, 100


class Pruning(msgspec.Struct):
    """The state of a prune that a user asked for. share: about how much of the ledger was searched, 0 to 1."""

    running: bool = False
    amounts: Amounts = {}
    share: float = 0.0
    trouble: str = ""


class Upkeep:
    """Runs the tasks that are due. is_idle: whether no image is in flight; folders: the inboxes, by number; clock: Unix
    seconds."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        metrics: Metrics,
        is_idle: Callable[[], bool],
        folders: Folders,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = config.state.path
        self._ledger = ledger
        self._metrics = metrics
        self._is_idle = is_idle
        self._counts = metrics.counts
        self._folders = folders
        self._clock = clock
        self._backups = KnownFolder(b"")
        self.configure(config)
        self._work: dict[str, Callable[[], Awaitable[str]]] = {
            "verify": self._verify,
            "backup": self._back_up,
            "upload": self._upload,
            "forget": self._forget,
            "prune": self._prune,
            "vacuum": self._vacuum,
        }
        self._last_runs = {run.task: run for run in read_upkeep(self._folder) if run.task in TASKS}
        for task, run in self._last_runs.items():
            metrics.upkeep_success.labels(task).set(run.succeeded_at or 0.0)
            metrics.upkeep_failed.labels(task).set(bool(run.failure))
        self.pruning = Pruning()
        self._asked = anyio.Event()
        self._before = 0.0
        self._one_at_a_time = anyio.Lock()  # of two at once, neither would know which bytes came again
        self._leaving = False

    def configure(self, config: Config) -> None:
        """Use these settings from now on. A task that is running goes on."""
        self._config, self._settings = config, config.upkeep
        upkeep = config.upkeep
        if os.fsencode(upkeep.backup_folder) != self._backups.path:
            self._backups = KnownFolder(os.fsencode(upkeep.backup_folder))
        backup_days = upkeep.backup_days if upkeep.backup_folder else 0.0
        upload_days = backup_days if upkeep.backup_url else 0.0
        ours = (upkeep.forget_days, upkeep.prune_days, upkeep.vacuum_days)
        days = (upkeep.verify_days, backup_days, upload_days, *ours)
        self._interval_seconds = {t: DAY_SECONDS * count for t, count in zip(TASKS, days, strict=True)}

    def last_runs(self) -> list[UpkeepRun]:
        """Each task that is on, or that ran before."""
        on = [task for task in TASKS if self._interval_seconds[task] or task in self._last_runs]
        return [self._last_run(task) for task in on]

    def _last_run(self, task: str) -> UpkeepRun:
        """How it went the last time, if it ran before."""
        return self._last_runs.get(task, UpkeepRun(task=task))

    def failures(self) -> list[str]:
        return [run.failure for run in self.last_runs() if run.failure]

    async def run(self, *, scheduled: bool = True) -> None:
        """Run until cancelled. scheduled: if false, only what a user asks for."""
        if self._backups.path:  # as it is at the start
            with contextlib.suppress(OSError):  # `_back_up` reports it
                await to_thread.run_sync(self._backups.check, abandon_on_cancel=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._prune_when_asked)
            while scheduled:
                if task := self.next_task():
                    await self.perform(task)
                else:
                    await anyio.sleep(POLL_SECONDS)

    def next_task(self) -> str | None:
        """The task that is due and may start now."""
        now = self._clock()
        if not is_quiet(self._settings.quiet_hours, now) or not self._is_idle():
            return None
        return next((task for task in TASKS if self._is_due(task, now)), None)

    def _is_due(self, task: str, now: float) -> bool:
        """A time in the future comes from a wrong clock: the wait is never longer than the interval."""
        interval, run = self._interval_seconds[task], self._last_run(task)
        if not interval or (task == "forget" and not are_scanned(self._folders)):
            return False
        if run.outcome != "done" and run.tried_at is not None:
            return not 0 <= now - run.tried_at < AGAIN_SECONDS.get(run.outcome, 0.0)
        return run.tried_at is None or not 0 <= now - run.tried_at < interval * (1 - EARLY)

    async def perform(self, task: str) -> None:
        """Run one task; if it fails, log that and go on."""
        started, began = self._clock(), time.monotonic()
        last = self._last_run(task)
        try:
            outcome, detail = "done", await self._work[task]()
        except Stopped:
            outcome, detail = "stopped", "stopped because images or a command arrived, or the daemon stopped"
        except Exception as error:  # noqa: BLE001 - of one task; whatever it is, work goes on
            outcome, detail = "failed", str(error) or repr(error)
            self._metrics.upkeep_failures.labels(task).inc()
            log.error("upkeep failed; work goes on", task=task, trouble=detail)
        else:
            self._metrics.upkeep_success.labels(task).set(started)
            log.info("upkeep done", task=task, detail=detail)
        self._last_runs[task] = UpkeepRun(
            task=task,
            tried_at=started,
            succeeded_at=started if outcome == "done" else last.succeeded_at,
            seconds=round(time.monotonic() - began, 3),
            outcome=outcome,
            detail=detail,
        )
        self._metrics.upkeep_failed.labels(task).set(outcome == "failed")
        try:
            write_upkeep(self._folder, self._last_runs.values())
        except OSError as error:  # it is tried again after the next task
            log.warning("the state of upkeep cannot be saved", why=str(error))

    # The tasks; each returns what was done, in a few words

    async def _verify(self) -> str:
        await run_in_background(check_ledger, self._ledger.path)
        part = int(self._clock() // (self._interval_seconds["verify"] or DAY_SECONDS)) % SHARES
        said = await run_in_background(check_some, self._config, part, SHARES)
        return f"the ledger is undamaged; {said}"

    async def _back_up(self) -> str:
        folder, now = Path(self._settings.backup_folder), self._clock()
        await to_thread.run_sync(self._backups.check)
        return str(
            await run_in_background(back_up_into, self._ledger.path, folder, self._settings.backups_kept, now)
        )

    async def _upload(self) -> str:
        settings = self._settings
        folder, kept = Path(settings.backup_folder), settings.backups_kept
        return await run_in_background(upload_backups, folder, settings.backup_url, kept)

    async def _forget(self) -> str:
        forgotten = await forget_skipped(self._ledger, self._folders, self._counts, lambda: self._leaving)
        return forgotten.sentence()

    async def _prune(self) -> str:
        before = self._clock() - DAY_SECONDS * self._settings.prune_age_days
        async with self._one_at_a_time:
            removed = await prune(self._ledger, before, self._counts.pruned)
        return (
            ", ".join(f"{amount.rows} {kind}" for kind, amount in removed.items() if amount.rows)
            or "nothing was old enough"
        )

    async def _vacuum(self) -> str:
        return await shrink(
            self._ledger, lambda: self._leaving or self._ledger.awaited > 0 or self.pruning.running
        )

    async def forget_at_end(self) -> None:
        """Let `run --once` forget skipped files, unless the last time took long and is not long ago."""
        last = self._last_run("forget")
        since = self._clock() - (last.tried_at or 0.0)
        rests = last.seconds > QUICK_SECONDS and 0 <= since < REST * last.seconds
        is_on = bool(self._interval_seconds["forget"] and self._counts.of(JobStatus.SKIPPED))
        if is_on and are_scanned(self._folders) and not rests:
            await self.perform("forget")

    def leave(self) -> None:
        """The daemon is about to end: what takes long stops at once."""
        self._leaving = True

    # What a person asks for

    def prune_soon(self, before: float) -> None:
        """Start to prune, unless that is already going on; `pruning` has its state. before: Unix seconds."""
        if not self.pruning.running:
            self.pruning, self._before = Pruning(running=True), before
            self._asked.set()

    async def _prune_when_asked(self) -> None:
        while True:
            await self._asked.wait()
            self._asked = anyio.Event()
            done, running = Pruning(), self.pruning

            def step(removed: Amounts, share: float, running: Pruning = running) -> None:
                running.amounts, running.share = removed, share

            try:
                async with self._one_at_a_time:
                    done.amounts = await prune(self._ledger, self._before, self._counts.pruned, step)
            except Exception as error:  # noqa: BLE001 - the command that asked for it reports it
                done.trouble = str(error) or repr(error)
            self.pruning = done


def is_quiet(hours: str, now: float) -> bool:
    """Whether it is within "HH:MM-HH:MM", local time; the end may be on the next day. Always true if that is empty."""
    if not hours:
        return True
    moment, (begin, end) = time.strftime("%H:%M", time.localtime(now)), hours.split("-")
    return begin <= moment < end if begin < end else moment >= begin or moment < end
