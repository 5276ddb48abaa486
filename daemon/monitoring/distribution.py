"""A histogram for values that come once for every image. prometheus_client's own takes a lock for each value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class Distribution(Collector):
    """Counts values by bucket. Only one thread may add values."""

    def __init__(
        self, name: str, help: str, *, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        """buckets: their upper bounds, ascending; larger values go into +Inf."""
        self._name, self._help = name, help
        self._bounds = list(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        names = [floatToGoString(bound) for bound in [*self._bounds, float("inf")]]  # type: ignore[no-untyped-call]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], buckets, self._sum)
        yield family
