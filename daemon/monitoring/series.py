"""Every series that visiond has in Prometheus, declared by subject and created at 0. metrics.py counts.

Label values come from closed sets only, never from a path or the text of an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.registry import Collector

from daemon import __version__
from daemon.core.errors import Loss, Refusal
from daemon.core.jobs import JobStatus
from daemon.core.notices import KINDS
from daemon.monitoring.distribution import Distribution
from daemon.monitoring.limits import PARTS
from daemon.monitoring.machine import DroppedLines
from daemon.monitoring.snapshot import TASKS
from stages.contract.base import Reason
from stages.contract.binning import BINS
from stages.registry.registry import ORDER

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
PAGE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LONG_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200, 43200)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RELOADED = ("done", "refused")  # how a reload can end
FAILED_FOR = tuple(reason for reason in Reason if reason is not Reason.UNPACKED)
SKIPPED_FOR = (Reason.NOT_AN_IMAGE, Reason.NOT_REGULAR, Reason.EMPTY, Reason.BYTES, Reason.UNPACKED)
OTHER = "other"  # bins of a custom rule
BIN_LABELS = (*BINS, OTHER)
UPLOADED = ("accepted", "repeated")  # how an upload can end that is not refused
STATUSES = ("2xx", "3xx", "4xx", "5xx")  # of their answers
OUTCOMES = (JobStatus.DONE, JobStatus.FAILED, JobStatus.SKIPPED, JobStatus.GONE)
STATES = ("loading", "ready", "silent", "waiting", "closed")  # of a worker

# The creation time of each series would double the number of series, and `rate` does not need it.
disable_created_metrics()  # type: ignore[no-untyped-call]


class PageKind(StrEnum):
    """What a request to the page asks for."""

    PAGE = "page"
    LIVE = "live"
    SEARCH = "search"
    PICTURE = "picture"
    FILE = "file"
    UPLOAD = "upload"
    API = "api"
    OTHER = "other"


class Series:
    """The registry and its series, by attribute."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._open_images()
        self._open_pipeline()
        self._open_scans_and_disks()
        self._open_inboxes()
        self._open_page()
        self._open_upkeep_and_sinks()
        self._open_looks()
        self._open_workers()
        self._open_devices()
        self._begin_at_zero()
        self.registry.register(DroppedLines())
        ProcessCollector(registry=self.registry)

    def _open_images(self) -> None:
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        distribution = partial(Distribution, registry=self.registry, buckets=SECONDS)
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
        self.pending = gauge("visiond_images_pending", "Images in the ledger that are not finished.")
        self.failed = gauge("visiond_images_failed", "Images in the ledger that are FAILED.")
        self.outdated = gauge(
            "visiond_images_outdated", "Images that are DONE by models which are not the present ones."
        )
        self.oldest_pending = gauge(
            "visiond_oldest_pending_seconds", "Age of the image that has waited longest; 0 if none waits."
        )
        self.last_success = gauge("visiond_last_success_timestamp_seconds", "When an image last became DONE.")

    def _open_pipeline(self) -> None:
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=SECONDS)
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
        self.disk_free = gauge(
            "visiond_disk_free_bytes", "Room on the disk of a folder that the daemon writes to.", ["folder"]
        )
        self.disk_size = gauge("visiond_disk_size_bytes", "Size of the disk of that folder.", ["folder"])
        self.watchdog_missed = counter(
            "visiond_watchdog_missed", "Times that the watchdog was not fed because no image came through."
        )

    def _open_inboxes(self) -> None:
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.inbox_images = counter(
            "visiond_inbox_images", "Finished images of an inbox.", ["inbox", "outcome"]
        )
        self.inbox_bins = counter(
            "visiond_inbox_bins", "Finished images of an inbox by bin.", ["inbox", "bin"]
        )
        self.inbox_image_seconds = counter(
            "visiond_inbox_image_seconds",
            "Time from reading to the durable result, added up over the images that became DONE.",
            ["inbox"],
        )
        self.inbox_wait_seconds = counter(
            "visiond_inbox_wait_seconds",
            "Time from seeing to reading, added up over the images that became DONE for the first time.",
            ["inbox"],
        )
        self.inbox_first_results = counter(
            "visiond_inbox_first_results", "Images that became DONE for the first time.", ["inbox"]
        )
        self.inbox_pending = gauge(
            "visiond_inbox_pending", "Images of an inbox that are not finished.", ["inbox"]
        )
        self.inbox_oldest = gauge(
            "visiond_inbox_oldest_pending_seconds",
            "Age of the image of an inbox that has waited longest; 0 if none waits.",
            ["inbox"],
        )
        self.inbox_scan_seconds = gauge(
            "visiond_inbox_scan_seconds", "Duration of the last scan of an inbox.", ["inbox"]
        )
        self.inbox_scanned_at = gauge(
            "visiond_inbox_last_scan_timestamp_seconds",
            "When an inbox was last scanned; 0: not yet.",
            ["inbox"],
        )
        self.inbox_missed = counter(
            "visiond_inbox_missed", "Files of an inbox that only a later scan found.", ["inbox"]
        )
        self.unread_folders = gauge(
            "visiond_unread_folders", "Folders in an inbox that cannot be read.", ["inbox"]
        )
        self.inbox_away = gauge(
            "visiond_inbox_away", "1 while an inbox cannot be read or does not answer.", ["inbox"]
        )

    def _open_page(self) -> None:
        counter = partial(Counter, registry=self.registry)
        self.page_requests = counter(
            "visiond_page_requests",
            "Requests to the page, by what they ask for and how they are answered.",
            ["kind", "status"],
        )
        self.page_seconds = Histogram(
            "visiond_page_request_duration_seconds",
            "Time from a request to the page to the beginning of its answer.",
            ["kind"],
            buckets=PAGE_SECONDS,
            registry=self.registry,
        )
        self.uploads = counter(
            "visiond_uploads",
            "Requests to POST /api/images that had the token. repeated: all of their files had come before.",
            ["outcome", "reason"],
        )
        self.upload_bytes = counter("visiond_upload_bytes", "Bytes of files that were uploaded.")

    def _open_upkeep_and_sinks(self) -> None:
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.upkeep_success = gauge(
            "visiond_upkeep_last_success_timestamp_seconds",
            "When an upkeep task last succeeded; 0: never.",
            ["task"],
        )
        self.upkeep_failed = gauge("visiond_upkeep_failed", "1 if the last run of a task failed.", ["task"])
        self.upkeep_failures = counter("visiond_upkeep_failures", "Upkeep tasks that failed.", ["task"])
        self.page_up = gauge("visiond_page_up", "0 while the page is not served.", ["address"])
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
        self.canary_failures = counter(
            "visiond_canary_failures",
            "Times that a worker found its answers to known images wrong.",
            ["device", "stage"],
        )
        self.canary_success = gauge(
            "visiond_canary_last_success_timestamp_seconds",
            "When a worker last found its answers to known images right.",
            ["worker"],
        )
        self.suspicious = gauge(
            "visiond_answers_suspicious",
            "1 if a stage's answers have changed and known images have not been looked at since, or if its embeddings are the "
            "same for all images.",
            ["worker", "stage"],
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
        self.reloads = counter("visiond_reloads", "Reloads of daemon.toml, by how they ended.", ["outcome"])
        self.configuration_refused = gauge(
            "visiond_configuration_refused",
            "1 if the last reload was refused: the daemon works with the settings that it had before.",
        )
        self.worker_gpu_memory = gauge(
            "visiond_worker_gpu_bytes", "GPU memory of a worker's tensors.", ["worker", "kind"]
        )
        self.worker_preparations = gauge(
            "visiond_worker_preparations",
            "What a worker has prepared for its GPU since it started. It grows no more after the first thousands of images.",
            ["worker", "preparation"],
        )

    def _open_devices(self) -> None:
        """Of a GPU, the CPU or a group of GPUs. Which worker is on which device is in `visiond_worker_info`."""
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.device_stage_images = counter(
            "visiond_device_stage_images", "Images processed by a stage on a device.", ["device", "stage"]
        )
        self.device_stage_seconds = counter(
            "visiond_device_stage_seconds",
            "Time of a stage for its batches on a device.",
            ["device", "stage"],
        )
        self.device_batches = counter(
            "visiond_device_batches", "Batches that the workers of a device have answered.", ["device"]
        )
        self.device_batch_images = counter(
            "visiond_device_batch_images", "Images in these batches.", ["device"]
        )
        self.device_workers = gauge(
            "visiond_device_workers", "Workers of a device by state.", ["device", "state"]
        )
        self.worker_info = gauge(
            "visiond_worker_info", "1: which device a worker is on.", ["worker", "segment", "device"]
        )

    def _begin_at_zero(self) -> None:
        """Create all series at 0; otherwise `rate` and `increase` miss the first event.
        `begin_segment` and `begin_inboxes` create the others."""
        Info("visiond_build", "Version of visiond.", registry=self.registry).info({"version": __version__})
        for metric, *labels in (
            (self.images, ("done", "gone"), ("",)),
            (self.images, ("failed",), FAILED_FOR),
            (self.images, ("skipped",), SKIPPED_FOR),
            (self.retries, FAILED_FOR),
            (self.page_requests, PageKind, STATUSES),
            (self.page_seconds, PageKind),
            (self.uploads, UPLOADED, ("",)),
            (self.uploads, ("refused",), Refusal),
            (self.upkeep_success, TASKS),
            (self.upkeep_failed, TASKS),
            (self.upkeep_failures, TASKS),
            (self.limited_by, PARTS),
            (self.reloads, RELOADED),
            (self.bins, BIN_LABELS),
            (self.stage_notice, ORDER, KINDS),
        ):
            begin(metric, *labels)

    def begin_inboxes(self, names: Mapping[int, str]) -> None:
        """Create the series of all inboxes at 0. names: by their numbers in the ledger."""
        labels = list(names.values())
        begin(self.inbox_images, labels, [status.name.lower() for status in OUTCOMES])
        begin(self.inbox_bins, labels, BIN_LABELS)
        for metric in (
            *(self.inbox_image_seconds, self.inbox_wait_seconds, self.inbox_first_results, self.inbox_missed),
            *(self.inbox_pending, self.inbox_oldest, self.inbox_scan_seconds),
            *(self.inbox_scanned_at, self.inbox_away),
        ):
            begin(metric, labels)

    def begin_segment(self, name: str, stages: Collection[str], devices: Collection[str]) -> None:
        """Create the series of this segment, its stages and its devices at 0."""
        self.batch_images.labels(name)
        self.begin_devices(stages, devices)
        for metric in (self.reused, self.stage_seconds, self.stage_images):
            begin(metric, stages)
        begin(self.out_of_memory, devices)
        begin(self.worker_restarts, devices, Loss)

    def begin_devices(self, stages: Collection[str], devices: Collection[str]) -> None:
        for metric in (self.device_batches, self.device_batch_images):
            begin(metric, devices)
        for metric in (self.device_stage_images, self.device_stage_seconds, self.canary_failures):
            begin(metric, devices, stages)
        begin(self.device_workers, devices, STATES)

    def of_page(self) -> list[Collector]:
        """Those that the page updates, which has a process of its own."""
        return [self.page_requests, self.page_seconds, self.uploads, self.upload_bytes]

    def of_executors(self) -> list[Collector]:
        """Those that an executor updates."""
        return [
            *(self.wait_seconds, self.reused, self.batch_images, self.stage_seconds, self.stage_images),
            *(self.out_of_memory, self.worker_restarts, self.model_load_seconds),
            *(self.worker_memory, self.worker_gpu_memory, self.worker_preparations),
            *(self.canary_failures, self.canary_success, self.suspicious),
            *(self.device_stage_images, self.device_stage_seconds),
            *(self.device_batches, self.device_batch_images),
        ]


def begin(metric: Counter | Gauge | Histogram, *values: Iterable[str]) -> None:
    """Create the series of a metric at 0, one for each combination of its labels' values."""
    for labels in itertools.product(*values):
        metric.labels(*labels)
