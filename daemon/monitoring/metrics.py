"""The Prometheus metrics, as the pipeline counts them. There is one registry, in the daemon;
workers send their figures with their replies.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain

import msgspec
from prometheus_client.core import Metric

from daemon.core.jobs import Admitted, Attempt, Ending, JobStatus, Waiting
from daemon.core.messages import Reply
from daemon.core.notices import KINDS, kind_of
from daemon.monitoring.counts import Counts
from daemon.monitoring.disks import DiskSpace
from daemon.monitoring.limits import PARTS
from daemon.monitoring.machine import Gpus
from daemon.monitoring.samples import Sum, add
from daemon.monitoring.series import OTHER, STATES, Series
from daemon.monitoring.snapshot import GpuState, LookState, SinkState, StageState, WorkerState
from stages.contract.base import Reason
from stages.contract.binning import BINS
from stages.registry.registry import ORDER


class Metrics(Series):
    """Every metric of the daemon, by attribute, and a method for each event."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.executors = Sum()  # of those in other processes, and of the page
        self._inboxes: Mapping[int, str] = {}  # names by number
        self._measured: set[str] = set()  # folders whose disk has answered
        self._gpus = Gpus()
        self.registry.register(self._gpus)
        self.pending.set_function(lambda: self.counts.of(JobStatus.PENDING))
        self.failed.set_function(lambda: self.counts.of(JobStatus.FAILED))

    def begin_inboxes(self, names: Mapping[int, str]) -> None:
        super().begin_inboxes(names)
        self._inboxes = dict(names)

    def noticed(self, of_stages: Mapping[str, str]) -> None:
        """of_stages: notice by stage; others have none."""
        for stage in dict.fromkeys([*ORDER, *of_stages]):
            kind = kind_of(of_stages[stage]) if stage in of_stages else ""
            for each in KINDS:
                self.stage_notice.labels(stage, each).set(each == kind)

    def limited(self, part: str) -> None:
        """part: that limits the rate; empty: none."""
        for each in PARTS:
            self.limited_by.labels(each).set(each == part)

    def inboxes_measured(self, waiting: Mapping[int, Waiting]) -> None:
        """waiting: of each inbox that has pending images."""
        for number, name in self._inboxes.items():
            images, oldest = waiting.get(number, Waiting(0, None))
            self.inbox_pending.labels(name).set(images)
            # The clock may have been set back.
            self.inbox_oldest.labels(name).set(max(0.0, time.time() - oldest) if oldest else 0.0)

    def devices_measured(self, workers: Sequence[WorkerState]) -> None:
        """All workers now."""
        counts = collections.Counter((worker.device, worker.state) for worker in workers)
        for device in {worker.device for worker in workers}:
            for state in STATES:
                self.device_workers.labels(device, state).set(counts[device, state])
        for worker in workers:
            self.worker_info.labels(worker.name, worker.name.rpartition("/")[0], worker.device).set(1)

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

    # What the pipeline reports, one method for each event.

    def scanned(self, inbox: str, seconds: float) -> None:
        """inbox: its label."""
        self.scan_seconds.observe(seconds)
        self.inbox_scan_seconds.labels(inbox).set(seconds)
        self.inbox_scanned_at.labels(inbox).set(time.time())

    def admitted(self, admitted: Admitted, inbox: int) -> None:
        """What became of files of one inbox."""
        self.counts.admitted(admitted)
        for outcome, reason, count in (
            ("skipped", Reason.NOT_REGULAR.value, admitted.skipped),
            ("gone", "", admitted.replaced),
        ):
            if count:
                self.images.labels(outcome, reason).inc(count)
                self.inbox_images.labels(self._name_of(inbox), outcome).inc(count)

    def fed(self, attempt: Attempt) -> None:
        if not attempt.job.has_result:  # a redo: it was seen long ago
            self.wait_seconds.observe(max(0.0, time.time() - attempt.job.seen_at))
        for stage in attempt.content.outputs:
            self.reused.labels(stage).inc()

    def replied(self, batcher: str, device: str, reply: Reply) -> None:
        self.batch_images.labels(batcher).observe(len(reply.outcomes))
        self.device_batches.labels(device).inc()
        self.device_batch_images.labels(device).inc(len(reply.outcomes))
        for run in reply.runs:
            self.stage_seconds.labels(run.stage).observe(run.seconds)
            self.stage_images.labels(run.stage).inc(run.images)
            self.device_stage_images.labels(device, run.stage).inc(run.images)
            self.device_stage_seconds.labels(device, run.stage).inc(run.seconds)
        if reply.out_of_memory:
            self.out_of_memory.labels(device).inc(reply.out_of_memory)

    def finished(self, endings: Sequence[Ending]) -> None:
        """Count a group of images: a label is looked up once for all that share it."""
        kinds: collections.Counter[tuple[int, JobStatus, str, str]] = collections.Counter()
        for ending in endings:
            self.counts.finished(ending)
            if not ending.keeps_result:
                reason = ending.failure.reason.value if ending.failure else ""
                kinds[ending.job.inbox, ending.status, reason, ending.bin] += 1
        for kind, images in kinds.items():
            self._count_kind(*kind, images)
        self._note_times([ending for ending in endings if ending.status is JobStatus.DONE])

    def _count_kind(self, inbox: int, status: JobStatus, reason: str, bin: str, images: int) -> None:
        outcome, name = status.name.lower(), self._name_of(inbox)
        if status is not JobStatus.PENDING:
            self.images.labels(outcome, reason).inc(images)
            self.inbox_images.labels(name, outcome).inc(images)
        elif reason:
            self.retries.labels(reason).inc(images)
        if status is JobStatus.DONE:
            label = bin if bin in BINS else OTHER
            self.bins.labels(label).inc(images)
            self.inbox_bins.labels(name, label).inc(images)

    def _note_times(self, done: Sequence[Ending]) -> None:
        """How long these took, and how long they had waited before."""
        now, clock = time.monotonic(), time.time()
        # Of an inbox: seconds from reading to the result, seconds of waiting before, and images that waited.
        times: dict[int, tuple[float, float, int]] = {}
        for ending in done:
            job, seconds = ending.job, max(0.0, now - ending.began_at)
            # With a result it was seen long ago.
            waited = 0.0 if job.has_result else max(0.0, clock - job.seen_at - seconds)
            spent, before, first = times.get(job.inbox, (0.0, 0.0, 0))
            times[job.inbox] = (spent + seconds, before + waited, first + (not job.has_result))
            self.image_seconds.observe(seconds)
        for inbox, (spent, before, first) in times.items():
            name = self._name_of(inbox)
            self.inbox_image_seconds.labels(name).inc(spent)
            self.inbox_wait_seconds.labels(name).inc(before)
            self.inbox_first_results.labels(name).inc(first)
        if done:
            self.last_success.set(clock)

    def _name_of(self, inbox: int) -> str:
        return self._inboxes.get(inbox, str(inbox))

    def collect(self) -> Iterable[Metric]:
        """All metrics, with those of other processes added."""
        return add(self.registry.collect(), self.executors.total())

    def stage_states(self) -> list[StageState]:
        """What each stage has done since the start, in all executors."""
        sums: collections.Counter[tuple[str, str]] = collections.Counter()
        own = [self.stage_images, self.stage_seconds, self.reused]
        for family in add(chain.from_iterable(each.collect() for each in own), self.executors.total()):
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
    """What the executor of a second look reports. label: stands for the name of its stage."""

    def __init__(self, metrics: Metrics, label: str, devices: Collection[str]) -> None:
        self._metrics, self._label = metrics, label
        self.worker_memory, self.worker_gpu_memory = metrics.worker_memory, metrics.worker_gpu_memory
        self.worker_preparations = metrics.worker_preparations
        self.canary_success, self.suspicious = metrics.canary_success, metrics.suspicious
        metrics.begin_devices([label], devices)
        for metric in (metrics.stage_seconds, metrics.stage_images):
            metric.labels(label)

    def fed(self, attempt: Attempt) -> None:
        """Already counted in its first look."""

    def replied(self, batcher: str, device: str, reply: Reply) -> None:
        runs = [msgspec.structs.replace(run, stage=self._label) for run in reply.runs]
        self._metrics.replied(batcher, device, msgspec.structs.replace(reply, runs=runs))
