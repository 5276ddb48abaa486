"""Metrics of the GPUs and of the log, asked for when they are wanted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from daemon.monitoring.snapshot import GpuState
from daemon.system import lines
from daemon.system.gpus import SLOWED_BY, Gpu, driver_errors, list_gpus

GPU_SECONDS = 1.0  # minimum between two queries of the driver
LABELS = ("gpu", "uuid", "name")


class Figure(NamedTuple):
    """values: of a GPU and the most of its memory that was in use, by the value of the label; "" if there is none."""

    name: str
    help: str
    values: Callable[[Gpu, int], Mapping[str, float | None]]
    label: str = ""


FIGURES = (
    Figure("memory_total_bytes", "Memory of a GPU.", lambda gpu, _: {"": gpu.total_bytes}),
    Figure("memory_used_bytes", "What all programs together use of it.", lambda gpu, _: {"": gpu.used_bytes}),
    Figure(
        "memory_peak_bytes", "The most that was in use when the daemon looked.", lambda _, peak: {"": peak}
    ),
    Figure(
        "memory_bytes",
        "Old name of the three metrics above; it will go with version 0.3.",
        lambda gpu, peak: {"total": gpu.total_bytes, "used": gpu.used_bytes, "peak": peak},
        "kind",
    ),
    Figure("utilization_ratio", "Share of time the GPU was busy.", lambda gpu, _: {"": gpu.utilisation}),
    Figure("temperature_celsius", "Temperature of a GPU.", lambda gpu, _: {"": gpu.sensors.celsius}),
    Figure("power_watts", "Power that a GPU draws.", lambda gpu, _: {"": gpu.sensors.watts}),
    Figure(
        "energy_joules_total",
        "Energy that a GPU has used since its driver was loaded.",
        lambda gpu, _: {"": gpu.sensors.joules},
    ),
    Figure(
        "memory_errors_total",
        "Errors of a GPU's memory (ECC) since its driver was loaded. Programs do not survive those that are uncorrected.",
        lambda gpu, _: {"corrected": gpu.sensors.corrected, "uncorrected": gpu.sensors.uncorrected},
        "error",
    ),
    Figure(
        "slowed",
        "1 while a GPU runs below its clocks for this cause.",
        lambda gpu, _: (
            {} if (by := gpu.sensors.slowed_by) is None else {each: each in by for each in SLOWED_BY}
        ),
        "cause",
    ),
)


class DroppedLines(Collector):
    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "visiond_log_lines_dropped",
            "Log lines dropped because nobody read the log in time.",
            lines.dropped(),
        )


class Gpus(Collector):
    """What the GPUs report, at most once a second. One that does not report a figure has no series of it."""

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
            GpuState(
                gpu.device,
                gpu.name,
                gpu.used_bytes,
                gpu.total_bytes,
                gpu.utilisation,
                gpu.sensors.celsius,
                gpu.uuid,
            )
            for gpu in self.ask()
        ]

    def collect(self) -> Iterable[Metric]:
        gpus = self.ask()
        for name, text, values, label in FIGURES:
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(f"visiond_gpu_{name}", text, labels=[*LABELS, *[label] * bool(label)])
            for gpu in gpus:
                for of_label, value in values(gpu, self._peaks[gpu.uuid]).items():
                    if value is not None:
                        own = [of_label] if label else []
                        metric.add_metric([gpu.number, gpu.uuid, gpu.name, *own], value)
            yield metric
