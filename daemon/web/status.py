"""The state of the daemon, for `visiond status`, /api/status, the health checks and systemd."""

from __future__ import annotations

import time
from collections import deque

import anyio

from daemon.inbox.walk import SHOWN, count_unread
from daemon.jobs import JobStatus
from daemon.ledger.ledger import Ledger
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import Snapshot, WorkerState
from daemon.pipeline import Pipeline
from daemon.upkeep.schedule import Upkeep

RATE_SECONDS = 30.0  # over which the rate is measured
ASK_SECONDS = 0.5  # a scrape's wait for the ledger, whose thread may be busy with VACUUM


class Status:
    """Keeps counts and rate, and judges health."""

    def __init__(
        self,
        pipeline: Pipeline,
        ledger: Ledger,
        metrics: Metrics,
        counts: dict[JobStatus, int],
        notices: dict[str, str] | None = None,
    ) -> None:
        """notices: by stage."""
        self._pipeline = pipeline
        self._ledger = ledger
        self._metrics = metrics
        self._counts = counts
        self.upkeep: Upkeep | None = None
        self._notices = notices or {}
        metrics.noticed(self._notices)
        self._started = time.monotonic()
        self._samples: deque[tuple[float, int]] = deque()
        self._oldest: float | None = None  # when the longest-waiting image was seen, in Unix seconds
        metrics.pending.set(counts[JobStatus.PENDING])
        metrics.in_flight.set_function(lambda: len(pipeline.in_flight))
        metrics.paused.set_function(lambda: float(bool(pipeline.retry.failing)))
        metrics.slab_size.set(pipeline.slab.size)
        metrics.slab_used.set_function(lambda: pipeline.slab.used)
        for lane in pipeline.lanes:
            metrics.queue_depth.labels(lane.name).set_function(lane.queue.qsize)

    def snapshot(self) -> Snapshot:
        pipeline = self._pipeline
        pending = max(0, int(self._metrics.value("visiond_images_pending")))
        left = min(pending, pipeline.limit.left) if pipeline.limit else pending
        rate, workers = self._rate(), self._workers()
        return Snapshot(
            running=True,
            pending=pending,
            in_flight=len(pipeline.in_flight),
            ended_in_this_run=sum(self._metrics.outcomes.values()),
            left_in_this_run=left,
            done=self._total(JobStatus.DONE) + self._metrics.results_kept,
            failed=max(0, self._total(JobStatus.FAILED) - self._metrics.failures_replaced),
            skipped=self._total(JobStatus.SKIPPED),
            gone=self._total(JobStatus.GONE),
            images_per_second=round(rate, 2),
            eta_seconds=left / rate if rate and any(worker.state == "ready" for worker in workers) else None,
            obstacles=pipeline.retry.blocked() + pipeline.held_back(),
            unread_folders=sum(map(len, unread := pipeline.watcher.unread())),
            unread=[line for folders in unread for line in folders.lines()][:SHOWN],
            slab_used_bytes=pipeline.slab.used,
            slab_size_bytes=pipeline.slab.size,
            workers=workers,
            notices=self._notices,
            uptime_seconds=round(time.monotonic() - self._started, 1),
            upkeep=self.upkeep.chores() if self.upkeep else [],
        )

    async def refresh(self) -> None:
        """Update the gauges that are not updated by events. Called before a scrape."""
        with anyio.move_on_after(ASK_SECONDS):  # otherwise the last known value is reported
            self._oldest = await self._ledger.oldest_pending()
        oldest = self._oldest
        self._metrics.oldest_pending.set(max(0.0, time.time() - oldest) if oldest else 0.0)  # the clock may have been set back
        for lane in self._pipeline.lanes:
            workers = lane.pool.health()
            states = [worker.state for worker in workers]
            for state in ("loading", "ready", "silent", "waiting", "closed"):
                self._metrics.workers.labels(lane.name, state).set(states.count(state))
            self._metrics.workers_sharing.labels(lane.name).set(sum(worker.shared for worker in workers))
            for seat in lane.pool.seats:
                if seat.worker and seat.worker.loaded:
                    beat, name = seat.worker.beat, seat.setup.name
                    self._metrics.worker_memory.labels(name).set(beat.resident_bytes)
                    self._metrics.worker_gpu_memory.labels(name, "used").set(beat.device_used_bytes)
                    self._metrics.worker_gpu_memory.labels(name, "peak").set(beat.device_peak_bytes)

    def unhealthy(self) -> list[str]:
        """The workers that are not ready, with the cause. Empty if the daemon is healthy."""
        return [
            f"{worker.name} on {worker.device} is {worker.state}" + (f": {worker.cause}" if worker.cause else "")
            for worker in self._workers()
            if worker.state != "ready"
        ]

    def is_dead(self) -> bool:
        """Whether a segment has no worker left, not even one that is still loading."""
        return any(
            all(worker.state not in ("ready", "loading") for worker in lane.pool.health()) for lane in self._pipeline.lanes
        )

    def put_back(self, status: JobStatus, images: int) -> None:
        """Count images of this status that are PENDING again."""
        self._metrics.pending.inc(images)
        self._counts[status] -= images
        self._pipeline.wake()

    def forget(self, status: JobStatus) -> None:
        """A version of this status was pruned. FAILED counts only newest versions, which are never pruned."""
        self._counts[status] -= status is not JobStatus.FAILED

    def unready(self) -> list[str]:
        """Why images do not get through now. Empty if they do."""
        return self.blocked() + self._pipeline.held_back()

    def blocked(self) -> list[str]:
        """What blocks the images in flight. An inbox that cannot be read does not."""
        stuck = [
            f"no worker of {lane.name} is ready"
            for lane in self._pipeline.lanes
            if not any(seat.healthy for seat in lane.pool.seats)
        ]
        return stuck + self._pipeline.retry.blocked()

    def warnings(self) -> list[str]:
        """Folders in the inboxes that are skipped because they cannot be read."""
        return [f"{count_unread(unread)}; `visiond status` lists them" for unread in self._pipeline.watcher.unread()]

    def _workers(self) -> list[WorkerState]:
        return [worker for lane in self._pipeline.lanes for worker in lane.pool.health()]

    def _rate(self) -> float:
        outcomes = self._metrics.outcomes
        now, done = time.monotonic(), outcomes[JobStatus.DONE] + outcomes[JobStatus.FAILED]
        self._samples.append((now, done))
        while now - self._samples[0][0] > RATE_SECONDS:
            self._samples.popleft()
        then, before = self._samples[0]
        return (done - before) / (now - then) if now > then else 0.0

    def _total(self, status: JobStatus) -> int:
        return self._counts[status] + self._metrics.outcomes[status]
