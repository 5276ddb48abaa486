"""The metrics of each device: of a GPU, the CPU or a group of GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.registry import Collector

from daemon.core.messages import Reply
from daemon.monitoring.snapshot import WorkerState

STATES = ("loading", "ready", "silent", "waiting", "closed")  # of a worker


class DeviceMetrics:
    """What the workers of a device do. Which worker is on which device is in `visiond_worker_info`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(prometheus_client.Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        self.stage_images = counter(
            "visiond_device_stage_images", "Images processed by a stage on a device.", ["device", "stage"]
        )
        self.stage_seconds = counter(
            "visiond_device_stage_seconds",
            "Time of a stage for its batches on a device.",
            ["device", "stage"],
        )
        self.batches = counter(
            "visiond_device_batches", "Batches that the workers of a device have answered.", ["device"]
        )
        self.batch_images = counter("visiond_device_batch_images", "Images in these batches.", ["device"])
        self.workers = gauge("visiond_device_workers", "Workers of a device by state.", ["device", "state"])
        self.worker = gauge(
            "visiond_worker_info", "1: which device a worker is on.", ["worker", "segment", "device"]
        )

    def begin(self, stages: Iterable[str], devices: Iterable[str]) -> None:
        """Create all series of these devices at 0."""
        stages = list(stages)
        for device in devices:
            for metric in (self.batches, self.batch_images):
                metric.labels(device)
            for stage in stages:
                self.stage_images.labels(device, stage)
                self.stage_seconds.labels(device, stage)
            for state in STATES:
                self.workers.labels(device, state)

    def replied(self, device: str, reply: Reply) -> None:
        self.batches.labels(device).inc()
        self.batch_images.labels(device).inc(len(reply.outcomes))
        for run in reply.runs:
            self.stage_images.labels(device, run.stage).inc(run.images)
            self.stage_seconds.labels(device, run.stage).inc(run.seconds)

    def measured(self, workers: Sequence[WorkerState]) -> None:
        """All workers now."""
        counts = Counter((worker.device, worker.state) for worker in workers)
        for device in {worker.device for worker in workers}:
            for state in STATES:
                self.workers.labels(device, state).set(counts[device, state])
        for worker in workers:
            self.worker.labels(worker.name, worker.name.rpartition("/")[0], worker.device).set(1)

    def of_stations(self) -> list[Collector]:
        """Those that a station updates."""
        return [self.stage_images, self.stage_seconds, self.batches, self.batch_images]
