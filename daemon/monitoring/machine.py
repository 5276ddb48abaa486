"""Metrics of the daemon's process and of the GPUs, measured when they are wanted."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from daemon.monitoring.snapshot import GpuState
from daemon.system import lines
from daemon.system.gpus import Gpu, driver_errors, list_gpus

GPU_SECONDS = 1.0  # minimum between two queries of the driver


class Process(Collector):
    """The daemon process, under the standard names of process metrics."""

    def collect(self) -> Iterable[Metric]:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        usage = resource.getrusage(resource.RUSAGE_SELF)
        yield GaugeMetricFamily("process_resident_memory_bytes", "Memory.", pages * resource.getpagesize())
        yield CounterMetricFamily("process_cpu_seconds", "CPU time.", usage.ru_utime + usage.ru_stime)
        yield CounterMetricFamily(
            "visiond_log_lines_dropped",
            "Log lines dropped because nobody read the log in time.",
            lines.dropped(),
        )


class Gpus(Collector):
    """Memory and utilization of the GPUs, queried when they are wanted, at most once a second."""

    def __init__(self) -> None:
        self._asked = -GPU_SECONDS
        self._gpus: list[Gpu] = []
        self._peaks: dict[str, int] = {}

    def ask(self) -> list[Gpu]:
        """The GPUs now or, within a second, as they were."""
        if (now := time.monotonic()) - self._asked >= GPU_SECONDS:
            self._asked, self._gpus = now, []
            with contextlib.suppress(*driver_errors()):
                self._gpus = list_gpus()
            for gpu in self._gpus:
                self._peaks[gpu.uuid] = max(gpu.used_bytes, self._peaks.get(gpu.uuid, 0))
        return self._gpus

    def states(self) -> list[GpuState]:
        return [
            GpuState(gpu.device, gpu.name, gpu.used_bytes, gpu.total_bytes, gpu.utilisation)
            for gpu in self.ask()
        ]

    def collect(self) -> Iterable[Metric]:
        labels = ["gpu", "uuid", "name"]
        memory = GaugeMetricFamily("visiond_gpu_memory_bytes", "GPU memory.", labels=[*labels, "kind"])
        utilisation = GaugeMetricFamily(
            "visiond_gpu_utilization_ratio", "Share of time the GPU was busy.", labels=labels
        )
        for gpu in self.ask():
            label, peak = [gpu.number, gpu.uuid, gpu.name], self._peaks[gpu.uuid]
            for kind, value in (("total", gpu.total_bytes), ("used", gpu.used_bytes), ("peak", peak)):
                memory.add_metric([*label, kind], value)
            if gpu.utilisation is not None:
                utilisation.add_metric(label, gpu.utilisation)
        return memory, utilisation
