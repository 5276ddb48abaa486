"""The state of the daemon, for `visiond status`, /api/status, the health checks and systemd."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import anyio
import msgspec
from anyio import to_thread

from daemon.config.reloading import Reloading
from daemon.core.errors import VisiondError
from daemon.core.hints import quantity
from daemon.core.jobs import JobStatus, Outdated
from daemon.inbox.sources import WRITTEN
from daemon.inbox.walk import SHOWN
from daemon.maintenance.keeping import ModelAnswers, keep_answers
from daemon.maintenance.schedule import Upkeep
from daemon.monitoring.counts import Hour, Pace, WaitingCount
from daemon.monitoring.disks import Disks
from daemon.monitoring.moments import LOOK_SECONDS, Limits
from daemon.monitoring.snapshot import BatcherState, SegmentState, Snapshot, WorkerState
from daemon.pipeline.coordinator import Pipeline
from daemon.system.log import recent_lines

OUTDATED_SECONDS = 5.0  # for which the number of files with results of earlier models is not counted again
ASK_SECONDS = 0.5  # a scrape's wait for the ledger, whose thread may be busy with VACUUM


class Status:
    """Keeps counts and rate, and judges health."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        notices: dict[str, str] | None = None,
        upkeep: Upkeep | None = None,
        settings_digest: str = "",
        count_outdated: Callable[[], Outdated | None] = lambda: None,
        waiting: WaitingCount | None = None,
        disks: Disks | None = None,
        page_problem: Callable[[], str] = str,
    ) -> None:
        """notices: by stage. count_outdated: takes a fraction of a second; called in a thread. waiting: the images of each
        inbox. disks: of the folders that are written to. page_problem: why there is no page, or empty."""
        self._page_problem = page_problem
        self._count_outdated = count_outdated
        self._outdated: Outdated | None = None
        self._count_again_at = 0.0
        self._settings_digest = settings_digest
        self._pipeline = pipeline
        metrics = self.metrics = pipeline.metrics
        self._counts = metrics.counts
        self.upkeep = upkeep
        self.reloading: Reloading | None = None  # set by the service
        self._notices = notices or {}
        metrics.noticed(self._notices)
        self._started = time.monotonic()
        self._reload_problem = ""  # why the last reload changed nothing
        metrics.configuration_refused.set_function(lambda: float(bool(self._reload_problem)))
        self._pace = Pace()
        self._hour = Hour()
        self._limits = Limits()
        self.disks = disks or Disks({})
        self.waiting = waiting or WaitingCount(dict)
        self._oldest: float | None = None  # when the longest-waiting image was seen, in Unix seconds
        metrics.in_flight.set_function(lambda: pipeline.in_flight)
        metrics.paused.set_function(lambda: float(bool(pipeline.blocked())))
        metrics.slab_size.set_function(lambda: self._sum_up("slab_size"))
        metrics.slab_used.set_function(lambda: self._sum_up("slab_used"))
        for delivery in pipeline.outbox.deliveries:
            metrics.follow_sink(delivery.name, delivery.state)
        for look in pipeline.looks:
            metrics.follow_look(look.coordinator.name, look.state)
        for batcher in self._segments():
            metrics.queue_depth.labels(batcher.name).set_function(partial(self._queued, batcher.name))

    def snapshot(self) -> Snapshot:
        pipeline, counts = self._pipeline, self._counts
        by_status: dict[str, Any] = {status.name.lower(): counts.of(status) for status in JobStatus}
        pending, most = by_status["pending"], pipeline.schedule.left
        left = pending if most is None else min(pending, most)
        workers = self._workers()
        rate = self._rate(workers)
        unread = pipeline.watcher.unread()
        return Snapshot(
            running=True,
            **by_status,
            in_flight=pipeline.in_flight,
            ended_in_this_run=counts.ended.total(),
            left_in_this_run=left,
            images_per_second=round(rate, 2),
            minutes=self._note_minute(),
            eta_seconds=left / rate if left and rate else None,
            obstacles=pipeline.blocked()
            + self._unwritten()
            + pipeline.held_back()
            + pipeline.outbox.problems()
            + self._crowded()
            + self._page_problems(),
            unread_folders=sum(map(len, unread)),
            unread=[*chain.from_iterable(folders.lines() for folders in unread)][:SHOWN],
            slab_used_bytes=self._sum_up("slab_used"),
            slab_size_bytes=self._sum_up("slab_size"),
            sinks=[delivery.state() for delivery in pipeline.outbox.deliveries],
            second_looks=[look.state() for look in pipeline.looks],
            workers=workers + self._workers_of_looks(),
            segments=[SegmentState(batcher.name, batcher.queued) for batcher in self._segments()],
            limit=self._limits.limit,
            moment=self._limits.last,
            notices=self._notices,
            settings_digest=self._settings_digest,
            uptime_seconds=round(time.monotonic() - self._started, 1),
            upkeep=self.upkeep.last_runs() if self.upkeep else [],
            outdated=self._outdated,
            log=recent_lines(),
            reload_problem=self._reload_problem,
        )

    async def complete_snapshot(self, *, at_end: bool = False) -> Snapshot:
        """The snapshot, with what takes longer to find out: the GPUs, what each stage has done, and the number of files that
        have results of earlier models, as of the last few seconds or, at the end of a run, as of now."""
        if at_end or time.monotonic() >= self._count_again_at:
            await self.count_outdated()
        gpus = await to_thread.run_sync(self.metrics.gpu_states)
        return msgspec.structs.replace(self.snapshot(), gpus=gpus, stages=self.metrics.stage_states())

    async def watch(self) -> None:
        """Find out what limits the rate, once a second, until cancelled."""
        while True:
            self._note_minute()
            with contextlib.suppress(OSError):  # /proc cannot be read now: the next look may be possible
                await self._look()
            await anyio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        has_gpu = any(worker.device.startswith("cuda") for worker in self._workers())
        # A driver that hangs must not keep the daemon from ending.
        measure = partial(self._limits.measure, self.metrics.gpu_states if has_gpu else list)
        load = await to_thread.run_sync(measure, abandon_on_cancel=True)
        self._limits.add(
            self._pipeline.states(),
            load,
            ended=self._counts.ended.total(),
            in_flight=self._pipeline.in_flight,
            has_files=self._has_files(),
            is_paused=bool(self._pipeline.blocked()),
        )
        self.metrics.limited(self._limits.limit.part)

    async def count_outdated(self) -> Outdated | None:
        """How many files have results of earlier models, as of now; None if that cannot be found out."""
        self._count_again_at = time.monotonic() + OUTDATED_SECONDS
        # a damaged ledger is reported elsewhere
        with contextlib.suppress(VisiondError, sqlite3.Error):
            self._outdated = await to_thread.run_sync(self._count_outdated, abandon_on_cancel=True)
        self.metrics.outdated.set(self._outdated.files if self._outdated else 0)
        return self._outdated

    async def refresh(self) -> None:
        """Update the gauges that are not updated by events. Called before a scrape."""
        # Otherwise the last known value is reported.
        with contextlib.suppress(VisiondError), anyio.move_on_after(ASK_SECONDS):
            self._oldest = await self._pipeline.ledger.oldest_pending()
            if time.monotonic() >= self._count_again_at:
                await self.count_outdated()
        await self.disks.look()
        self.metrics.measured(dict(self.disks.rooms))
        away = self._pipeline.watcher.away() | self._pipeline.schedule.away().keys()
        for number, label in self._pipeline.watcher.labels().items():
            self.metrics.inbox_away.labels(label).set(number in away)
        self.metrics.inboxes_measured(await self.waiting.count())
        oldest = self._oldest
        # The clock may have been set back.
        self.metrics.oldest_pending.set(max(0.0, time.time() - oldest) if oldest else 0.0)
        for batcher in self._segments():
            self.metrics.workers_measured(batcher.name, batcher.workers)
        self.metrics.devices_measured(self._workers() + self._workers_of_looks())
        for executor in [*self._pipeline.executors, *(look.executor for look in self._pipeline.looks)]:
            executor.measure()

    def follow_reloads(self, reloading: Reloading) -> None:
        """Show from now on how its reloads end."""
        self.reloading = reloading
        reloading.ended = self._note_reload

    def _note_reload(self, problems: Sequence[str]) -> None:
        self._reload_problem = " ".join(problems)
        self.metrics.reloads.labels("refused" if problems else "done").inc()

    def unhealthy(self) -> list[str]:
        """The workers that are not ready, with the cause. Empty if the daemon is healthy."""
        return [
            f"{worker.name} on {worker.device} is {worker.state}"
            + (f": {worker.cause}" if worker.cause else "")
            for worker in self._workers()
            if worker.state != "ready"
        ]

    def is_dead(self) -> bool:
        """Whether a segment has no worker left, not even one that is still loading or waits for memory."""
        return any(
            all(
                worker.state not in ("ready", "loading") and not worker.short_of_memory
                for worker in batcher.workers
            )
            for batcher in self._segments()
        )

    async def note_lost(self, ids: list[int]) -> int:
        """The files of these images cannot be read again. Returns how many the ledger has noted."""
        images = await self._pipeline.ledger.note_lost(ids)
        self._count_again_at = 0.0
        return images

    async def keep_answers(self, groups: Sequence[ModelAnswers]) -> int:
        """As the function of this name. Raises WrongArgument."""
        return await keep_answers(self._pipeline.ledger, groups)

    async def put_back(self, status: JobStatus, ids: list[int], *, distrust: bool = False) -> int:
        """Set images of this status to PENDING; returns how many have changed. distrust: as `Ledger.put_back`."""
        images = await self._pipeline.ledger.put_back(status, ids, distrust=distrust)
        self._count_again_at = 0.0
        self._counts.put_back(status, images)
        self._pipeline.wake()
        return images

    def unready(self) -> list[str]:
        """Why images do not get through now. Empty if they do."""
        return self.blocked() + [why for why in self._pipeline.held_back() if not why.endswith(WRITTEN)]

    def blocked(self) -> list[str]:
        """What blocks the images in flight. An inbox that cannot be read does not."""
        stuck = []
        for batcher in self._segments():
            if not any(worker.state == "ready" for worker in batcher.workers):
                why = next((worker.cause for worker in batcher.workers if worker.short_of_memory), "")
                stuck.append(f"no worker of {batcher.name} is ready{f': {why}' if why else ''}")
        return stuck + self._pipeline.blocked()

    def warnings(self) -> list[str]:
        """Problems that stop no image: folders in the inboxes that cannot be read, files that others write to, and sinks."""
        unread = [
            f"{unread.summary()}; `visiond status` lists them" for unread in self._pipeline.watcher.unread()
        ]
        written = [why for why in self._pipeline.publisher.held_back() if why.endswith(WRITTEN)]
        of_looks = [look.problem for look in self._pipeline.looks if look.problem]
        others = self._crowded() + of_looks + self._page_problems()
        return unread + written + self._pipeline.outbox.problems() + others

    def _unwritten(self) -> list[str]:
        """Images that are pending here and DONE in the ledger."""
        if not (self._pipeline.blocked() and (images := self._pipeline.schedule.unwritten)):
            return []
        wait, are = ("waits", "it is") if images == 1 else ("wait", "they are")
        return [
            f"{quantity(images, 'pending image')} {wait} only for that: `list`, `show` and `export` read "
            f"the ledger, where {are} DONE"
        ]

    def _page_problems(self) -> list[str]:
        problem = self._page_problem()
        return [f"page: {problem}"] if problem else []

    def _crowded(self) -> list[str]:
        """On which GPUs workers wait for memory."""
        waiting: dict[str, list[WorkerState]] = {}
        for worker in self._workers():
            if worker.short_of_memory:
                waiting.setdefault(worker.device, []).append(worker)
        return [
            f"{quantity(len(workers), 'worker')} of {device} wait{'s' * (len(workers) == 1)} for GPU memory: "
            f"{workers[0].cause}"
            for device, workers in waiting.items()
        ]

    def _has_files(self) -> bool:
        """Whether files wait to be read, or are unpacked. What is to be tried again later does not wait."""
        pipeline = self._pipeline
        if pipeline.unpacker and pipeline.schedule.has(pipeline.unpacker):
            return True
        return not pipeline.is_idle and self._counts.of(JobStatus.PENDING) > pipeline.in_flight

    def _segments(self) -> list[BatcherState]:
        """What all executors have of each segment, together."""
        batchers: dict[str, list[BatcherState]] = {}
        for batcher in chain.from_iterable(state.batchers for state in self._pipeline.states()):
            batchers.setdefault(batcher.name, []).append(batcher)
        return [
            BatcherState(name, sum(batcher.queued for batcher in parts), _workers_of(parts))
            for name, parts in batchers.items()
        ]

    def _sum_up(self, figure: str) -> int:
        """Of all executors."""
        return sum(getattr(state, figure) for state in self._pipeline.states())

    def _queued(self, name: str) -> int:
        return sum(batcher.queued for batcher in self._segments() if batcher.name == name)

    def _workers(self) -> list[WorkerState]:
        return _workers_of(self._segments())

    def _workers_of_looks(self) -> list[WorkerState]:
        states = (look.executor.state() for look in self._pipeline.looks)
        return _workers_of(batcher for state in states for batcher in state.batchers)

    def _note_minute(self) -> list[int]:
        return self._hour.note(time.monotonic(), self._counts.finished_in_this_run)

    def _rate(self, workers: list[WorkerState]) -> float:
        ready = frozenset((worker.name, worker.ready_at) for worker in workers if worker.state == "ready")
        return self._pace.measure(time.monotonic(), self._counts, ready)


def _workers_of(batchers: Iterable[BatcherState]) -> list[WorkerState]:
    return [worker for batcher in batchers for worker in batcher.workers]
