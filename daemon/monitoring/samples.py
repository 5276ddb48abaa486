"""Samples of metrics as values, to be sent from an executor, or the page, to the daemon and added up there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample as PrometheusSample

Key = tuple[str, str, tuple[tuple[str, str], ...]]  # family, sample, labels


class Sample(msgspec.Struct, array_like=True, frozen=True):
    family: str
    name: str
    labels: dict[str, str]
    value: float
    counts: bool  # a counter or a histogram, whose value is kept after the executor is gone

    @property
    def key(self) -> Key:
        return self.family, self.name, tuple(sorted(self.labels.items()))


def read_samples(collectors: Iterable[Collector]) -> list[Sample]:
    """The values of these metrics now."""
    return [
        Sample(family.name, sample.name, sample.labels, sample.value, family.type != "gauge")
        for collector in collectors
        for family in collector.collect()
        for sample in family.samples
    ]


class Sum:
    """The samples of all executors, and of the page. What one counted before it was lost stays in the sum, because
    Prometheus reads a falling counter as a restart."""

    def __init__(self) -> None:
        self._lasting: Counter[Key] = Counter()
        self._now: dict[object, list[Sample]] = {}

    def take(self, executor: object, samples: list[Sample]) -> None:
        """An executor's samples, in place of its earlier ones."""
        self._now[executor] = samples

    def keep(self, executor: object) -> None:
        """The executor was lost: its counts stay, its gauges do not."""
        for sample in self._now.pop(executor, []):
            if sample.counts:
                self._lasting[sample.key] += sample.value  # type: ignore[assignment]

    def total(self) -> dict[Key, float]:
        total: dict[Key, float] = dict(self._lasting)
        for samples in self._now.values():
            for sample in samples:
                total[sample.key] = total.get(sample.key, 0.0) + sample.value
        return total


def add(families: Iterable[Metric], total: Mapping[Key, float]) -> Iterator[Metric]:
    """The families with these values added to theirs."""
    rest = dict(total)
    for family in families:
        found = []
        for sample in family.samples:
            key = (family.name, sample.name, tuple(sorted(sample.labels.items())))
            found.append(sample._replace(value=sample.value + rest.pop(key, 0.0)))
        for key in [key for key in rest if key[0] == family.name]:  # series that only executors have
            found.append(PrometheusSample(key[1], dict(key[2]), rest.pop(key)))
        family.samples = found
        yield family
