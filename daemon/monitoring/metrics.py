"""The Prometheus metrics. There is one registry, in the daemon;
workers send their figures with their replies.

Label values come from closed sets only, never from a path or the text of an error.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import chain

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from daemon import __version__
from daemon.core.jobs import Admitted, Attempt, Ending, JobStatus
from daemon.core.messages import Reply
from daemon.monitoring.counts import Counts
from daemon.monitoring.devices import STATES, DeviceMetrics
from daemon.monitoring.disks import DiskSpace
from daemon.monitoring.distribution import Distribution
from daemon.monitoring.inboxes import InboxMetrics
from daemon.monitoring.limits import PARTS
from daemon.monitoring.machine import Gpus, Process
from daemon.monitoring.notices import KINDS, kind_of
from daemon.monitoring.samples import Sum, add
from daemon.monitoring.snapshot import TASKS, GpuState, LookState, SinkState, StageState, WorkerState
from stages.contract.base import Reason
from stages.contract.binning import BINS
from stages.registry.registry import ORDER

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LONG_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200, 43200)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
EXCHANGED = ("done", "undone", "refused")  # how an exchange of models can end
RELOADED = ("done", "refused")  # how a reload can end
FAILED_FOR = tuple(reason for reason in Reason if reason is not Reason.UNPACKED)
SKIPPED_FOR = (Reason.NOT_AN_IMAGE, Reason.NOT_REGULAR, Reason.EMPTY, Reason.BYTES, Reason.UNPACKED)

# The creation time of each series would double the number of series, and `rate` does not need it.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Loss(StrEnum):
    """Why a worker had to be replaced."""

    DIED = "died"
    TIMEOUT = "timeout"  # a batch took too long
    LOAD = "load"  # lost before it was ready
    SHARING = "sharing"  # a worker was lost that shared its GPU
    MEMORY = "memory"  # its GPU had too little memory for it


class Metrics:
    """Every metric of the daemon, by attribute."""

    def __init__(self, counts: Counts | None = None) -> None:
        self.counts = counts or Counts()
        registry = self.registry = CollectorRegistry()
        self.stations = Sum()  # of those in other processes
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=SECONDS)
        distribution = partial(Distribution, registry=registry, buckets=SECONDS)

        self.images = counter("visiond_images", "Finished images.", ["outcome", "reason"])
        self.retries = counter("visiond_retries", "Failed attempts that are repeated.", ["reason"])
        self.bins = counter(
            "visiond_bins", "Finished images by bin (A, B, C; other: bins of a custom rule).", ["bin"]
        )
        self.image_seconds = distribution(
            "visiond_image_duration_seconds", "Time from reading an image to its durable result."
        )
        self.wait_seconds = distribution(
            "visiond_image_wait_seconds", "Time from seeing an image to reading it.", buckets=LONG_SECONDS
        )
        self.in_flight = gauge("visiond_images_in_flight", "Images read and not finished yet.")
        pending = gauge("visiond_images_pending", "Images in the ledger that are not finished.")
        pending.set_function(lambda: self.counts.of(JobStatus.PENDING))
        self.oldest_pending = gauge(
            "visiond_oldest_pending_seconds", "Age of the image that has waited longest; 0 if none waits."
        )
        self.last_success = gauge("visiond_last_success_timestamp_seconds", "When an image last became DONE.")

        self.slab_used = gauge("visiond_slab_used_bytes", "Bytes of images in flight.")
        self.slab_size = gauge(
            "visiond_slab_size_bytes", "Size of the slab: the budget for images in flight."
        )
        self.reused = counter("visiond_reused_results", "Results reused from the ledger.", ["stage"])
        self.queue_depth = gauge("visiond_queue_depth", "Images waiting for a worker.", ["segment"])
        self.batch_images = histogram(
            "visiond_batch_images", "Images in a batch sent to a worker.", ["segment"], buckets=BATCHES
        )
        self.stage_seconds = histogram(
            "visiond_stage_duration_seconds", "Time of a stage for one batch.", ["stage"]
        )
        self.stage_images = counter("visiond_stage_images", "Images processed by a stage.", ["stage"])
        self.commit_seconds = histogram(
            "visiond_ledger_commit_seconds", "Duration of a transaction of the ledger."
        )
        self.paused = gauge("visiond_paused", "1 while results cannot be written.")
        self.limited_by = gauge("visiond_limited_by", "1: this part limits the rate now.", ["part"])
        self._open_scans_and_disks()
        self.inboxes = InboxMetrics(registry)
        self._open_upkeep_and_sinks()
        self._open_looks()
        self._open_workers()
        self.devices = DeviceMetrics(registry)
        self._begin_at_zero()
        registry.register(Process())
        self._gpus = Gpus()
        registry.register(self._gpus)

    def _open_scans_and_disks(self) -> None:
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.scan_seconds = Histogram(
            "visiond_scan_duration_seconds",
            "Duration of a scan of an inbox.",
            buckets=LONG_SECONDS,
            registry=self.registry,
        )
        self.reconcile_found = counter(
            "visiond_reconcile_found",
            "Files found by a later scan, which events had missed. Inboxes without events do not count.",
        )
        self.watch_overflows = counter("visiond_watch_overflows", "Overflows of the kernel's event queue.")
        self._measured: set[str] = set()  # folders whose disk has answered
        self.disk_free = gauge(
            "visiond_disk_free_bytes", "Room on the disk of a folder that the daemon writes to.", ["folder"]
        )
        self.disk_size = gauge("visiond_disk_size_bytes", "Size of the disk of that folder.", ["folder"])
        self.watchdog_missed = counter(
            "visiond_watchdog_missed", "Times that the watchdog was not fed because no image came through."
        )

    def _open_upkeep_and_sinks(self) -> None:
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.upkeep_success = gauge(
            "visiond_upkeep_last_success_timestamp_seconds",
            "When an upkeep task last succeeded; 0: never.",
            ["task"],
        )
        self.upkeep_failures = counter("visiond_upkeep_failures", "Upkeep tasks that failed.", ["task"])
        self.sink_behind = gauge(
            "visiond_sink_records_behind", "Published records that a sink does not have yet.", ["sink"]
        )
        self.sink_success = gauge(
            "visiond_sink_last_success_timestamp_seconds",
            "When a sink last took records; 0: never.",
            ["sink"],
        )

    def _open_looks(self) -> None:
        gauge = partial(Gauge, registry=self.registry)
        self.looks_waiting = gauge(
            "visiond_second_looks_waiting", "Images that wait for a second look.", ["look"]
        )
        self.looks_ended = gauge(
            "visiond_second_looks", "Images in the ledger that have had a second look.", ["look", "outcome"]
        )

    def _open_workers(self) -> None:
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.workers = gauge("visiond_workers", "Workers by state.", ["segment", "state"])
        self.workers_short = gauge(
            "visiond_workers_short_of_memory", "Workers that wait for memory of their GPU.", ["segment"]
        )
        self.workers_sharing = gauge(
            "visiond_workers_sharing", "Workers that share their GPU by MPS.", ["segment"]
        )
        self.worker_restarts = counter(
            "visiond_worker_restarts", "Workers that were replaced.", ["device", "reason"]
        )
        self.model_load_seconds = gauge(
            "visiond_model_load_seconds", "Time that a stage's model last took to load.", ["device", "stage"]
        )
        self.out_of_memory = counter(
            "visiond_out_of_memory", "Batches halved because the GPU's memory was full.", ["device"]
        )
        self.worker_memory = gauge("visiond_worker_resident_bytes", "Host memory of a worker.", ["worker"])
        self.stage_notice = gauge(
            "visiond_stage_notice_info", "1 if a stage has a notice of this kind.", ["stage", "notice"]
        )
        self.exchanges = counter("visiond_exchanges", "Exchanges of models, by how they ended.", ["outcome"])
        self.reloads = counter("visiond_reloads", "Reloads of daemon.toml, by how they ended.", ["outcome"])
        self.configuration_refused = gauge(
            "visiond_configuration_refused",
            "1 if the last reload was refused, or its models did not load: the daemon works with what it had before.",
        )
        self.exchange_running = gauge("visiond_exchange_running", "1 while models are exchanged.")
        self.worker_gpu_memory = gauge(
            "visiond_worker_gpu_bytes", "GPU memory of a worker's tensors.", ["worker", "kind"]
        )

    def _begin_at_zero(self) -> None:
        """Create all series at 0; otherwise `rate` and `increase` miss the first event.
        `begin_segment` creates those of a segment."""
        Info("visiond_build", "Version of visiond.", registry=self.registry).info({"version": __version__})
        for outcome, reasons in (
            ("done", [""]),
            ("gone", [""]),
            ("failed", FAILED_FOR),
            ("skipped", SKIPPED_FOR),
        ):
            for reason in reasons:
                self.images.labels(outcome, str(reason))
        for reason in FAILED_FOR:
            self.retries.labels(reason.value)
        for task in TASKS:
            self.upkeep_success.labels(task)
            self.upkeep_failures.labels(task)
        self.limited("")
        for outcome in EXCHANGED:
            self.exchanges.labels(outcome)
        for outcome in RELOADED:
            self.reloads.labels(outcome)
        for name in (*BINS, "other"):
            self.bins.labels(name)
        for stage in ORDER:
            for kind in KINDS:
                self.stage_notice.labels(stage, kind)

    def noticed(self, of_stages: Mapping[str, str]) -> None:
        """of_stages: notice by stage; others have none."""
        for stage in ORDER:
            kind = kind_of(of_stages[stage]) if stage in of_stages else ""
            for each in KINDS:
                self.stage_notice.labels(stage, each).set(each == kind)

    def limited(self, part: str) -> None:
        """part: that limits the rate; empty: none."""
        for each in PARTS:
            self.limited_by.labels(each).set(each == part)

    def workers_measured(self, segment: str, workers: Sequence[WorkerState]) -> None:
        """All workers of a segment now."""
        states = [worker.state for worker in workers]
        for state in STATES:
            self.workers.labels(segment, state).set(states.count(state))
        self.workers_short.labels(segment).set(sum(worker.short_of_memory for worker in workers))
        self.workers_sharing.labels(segment).set(sum(worker.shared for worker in workers))

    def measured(self, rooms: Mapping[str, DiskSpace]) -> None:
        """rooms: on the disk of each folder. A folder that does not answer has no series."""
        for folder, room in rooms.items():
            self.disk_free.labels(folder).set(room.free_bytes)
            self.disk_size.labels(folder).set(room.size_bytes)
        for folder in self._measured - rooms.keys():
            self.disk_free.remove(folder)
            self.disk_size.remove(folder)
        self._measured = set(rooms)

    def follow_sink(self, name: str, state: Callable[[], SinkState]) -> None:
        """state: asked at each scrape."""
        self.sink_behind.labels(name).set_function(lambda: state().behind)
        self.sink_success.labels(name).set_function(lambda: state().succeeded_at or 0.0)

    def follow_look(self, name: str, state: Callable[[], LookState]) -> None:
        """state: asked at each scrape."""
        self.looks_waiting.labels(name).set_function(lambda: state().waiting)
        self.looks_ended.labels(name, "done").set_function(lambda: state().done)
        self.looks_ended.labels(name, "failed").set_function(lambda: state().failed)

    def begin_segment(self, name: str, stages: Iterable[str], devices: Iterable[str]) -> None:
        """Create the series of this segment, its stages and its devices at 0."""
        self.batch_images.labels(name)
        stages, devices = list(stages), list(devices)
        self.devices.begin(stages, devices)
        for stage in stages:
            for metric in (self.reused, self.stage_seconds, self.stage_images):
                metric.labels(stage)
        for device in devices:
            self.out_of_memory.labels(device)
            for loss in Loss:
                self.worker_restarts.labels(device, loss.value)

    # What the pipeline reports, one method for each event.

    def admitted(self, admitted: Admitted, inbox: int) -> None:
        """What became of files of one inbox."""
        self.counts.admitted(admitted)
        self.inboxes.admitted(admitted, inbox)
        for status, reason, count in (
            (JobStatus.SKIPPED, Reason.NOT_REGULAR.value, admitted.skipped),
            (JobStatus.GONE, "", admitted.replaced),
        ):
            if count:
                self.images.labels(status.name.lower(), reason).inc(count)

    def fed(self, attempt: Attempt) -> None:
        if not attempt.job.has_result:  # a redo: it was seen long ago
            self.wait_seconds.observe(max(0.0, time.time() - attempt.job.seen_at))
        for stage in attempt.content.outputs:
            self.reused.labels(stage).inc()

    def replied(self, lane: str, device: str, reply: Reply) -> None:
        self.batch_images.labels(lane).observe(len(reply.outcomes))
        self.devices.replied(device, reply)
        for run in reply.runs:
            self.stage_seconds.labels(run.stage).observe(run.seconds)
            self.stage_images.labels(run.stage).inc(run.images)
        if reply.out_of_memory:
            self.out_of_memory.labels(device).inc(reply.out_of_memory)

    def finished(self, endings: Sequence[Ending]) -> None:
        """Count a group of images: a label is looked up once for all that share it."""
        self.inboxes.finished(endings)
        self.counts.finished(endings)
        now, last_success = time.monotonic(), 0.0
        reasons: collections.Counter[tuple[JobStatus, str]] = collections.Counter()
        bins: collections.Counter[str] = collections.Counter()
        for ending in endings:
            if ending.keeps_result or (ending.status is JobStatus.PENDING and not ending.failure):
                continue
            reasons[ending.status, ending.failure.reason.value if ending.failure else ""] += 1
            if ending.status is JobStatus.DONE:
                bins[ending.bin if ending.bin in BINS else "other"] += 1
                self.image_seconds.observe(now - ending.began_at)
                last_success = ending.at
        if last_success:
            self.last_success.set(last_success)
        for (status, reason), count in reasons.items():
            if status is JobStatus.PENDING:
                self.retries.labels(reason).inc(count)
            else:
                self.images.labels(status.name.lower(), reason).inc(count)
        for name, count in bins.items():
            self.bins.labels(name).inc(count)

    def of_stations(self) -> list[Collector]:
        """Those that a station updates."""
        return [
            *(self.wait_seconds, self.reused, self.batch_images, self.stage_seconds, self.stage_images),
            *(self.out_of_memory, self.worker_restarts, self.model_load_seconds),
            *(self.worker_memory, self.worker_gpu_memory),
            *self.devices.of_stations(),
        ]

    def collect(self) -> Iterable[Metric]:
        """All metrics, with those of the stations in other processes added."""
        return add(self.registry.collect(), self.stations.total())

    def stage_states(self) -> list[StageState]:
        """What each stage has done since the start, in all stations."""
        sums: collections.Counter[tuple[str, str]] = collections.Counter()
        own = [self.stage_images, self.stage_seconds, self.reused]
        for family in add(chain.from_iterable(each.collect() for each in own), self.stations.total()):
            for sample in family.samples:
                sums[sample.name, sample.labels["stage"]] += sample.value  # type: ignore[assignment]
        return [
            StageState(
                stage,
                int(images),
                sums["visiond_stage_duration_seconds_sum", stage],
                int(sums["visiond_reused_results_total", stage]),
            )
            for (name, stage), images in sums.items()
            if name == "visiond_stage_images_total"
        ]

    def gpu_states(self) -> list[GpuState]:
        """The GPUs now. Asks the driver, which may take a while: call it in a thread."""
        return self._gpus.states()

    def value(self, name: str, **labels: str) -> float:
        """The current value of a sample; 0 if it has none yet."""
        found = (sample for family in self.collect() for sample in family.samples)
        return next((s.value for s in found if (s.name, s.labels) == (name, labels)), 0.0)


class LookMetrics:
    """What the station of a second look reports. label: stands for the name of its stage."""

    def __init__(self, metrics: Metrics, label: str, devices: Iterable[str]) -> None:
        self._metrics, self._label = metrics, label
        self.worker_memory, self.worker_gpu_memory = metrics.worker_memory, metrics.worker_gpu_memory
        metrics.devices.begin([label], devices)
        for metric in (metrics.stage_seconds, metrics.stage_images):
            metric.labels(label)

    def fed(self, attempt: Attempt) -> None:
        """Already counted in its first look."""

    def replied(self, lane: str, device: str, reply: Reply) -> None:
        runs = [msgspec.structs.replace(run, stage=self._label) for run in reply.runs]
        self._metrics.replied(lane, device, msgspec.structs.replace(reply, runs=runs))
