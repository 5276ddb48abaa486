"""The steady part of a run, the middle 70 % of its images: their rate, how busy the machine was, and what limited the rate.

Before it batches fill and kernels are prepared; after it some workers have nothing left to do.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from daemon.measure.meter import Meter
from daemon.monitoring.limits import GPU, find_limit

MIDDLE = (0.15, 0.85)  # shares of the images


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are 0 to 1. None, or no shares: the steady part was too short to tell, or there is no GPU."""

    images_per_second: float
    slowest: float  # images per second, of its thirds
    fastest: float
    gpu_busy: float | None = None
    cores_busy: float | None = None
    cpu_milliseconds: float | None = None  # for an image, of all processes together
    cpu_milliseconds_by_kind: dict[str, float] = {}  # of process
    shares: dict[str, float] = {}  # how occupied each part was
    limited_by: str = ""  # a part
    why: str = ""


def find_steady(times: Sequence[float], meter: Meter) -> Steady:
    """times: when each image was published, in order, in seconds since the meter's start. What limits is found by the
    daemon's own rule (daemon/monitoring/limits.py) and from what it measured itself."""
    rate, slowest, fastest = measure_rate(times)
    first, last = (meter.started + times[min(len(times) - 1, int(len(times) * share))] for share in MIDDLE)
    limit = find_limit([moment for moment in meter.moments if first <= moment.at <= last])
    cpu = {kind: 1000 * cores / max(rate, 1e-9) for kind, cores in limit.cores_by_kind.items()}
    return Steady(
        images_per_second=rate,
        slowest=slowest,
        fastest=fastest,
        gpu_busy=limit.shares.get(GPU),
        cores_busy=limit.cores_busy,
        cpu_milliseconds=sum(cpu.values()) if cpu else None,
        cpu_milliseconds_by_kind=cpu,
        shares=limit.shares,
        limited_by=limit.part,
        why=limit.why,
    )


def measure_rate(times: Sequence[float]) -> tuple[float, float, float]:
    """Images per second in the middle: the slope of a line through the ends of batches. Also the lowest and
    highest rate of its thirds.

    times: when each image was finished, in order. Images of a batch are finished together, so a part that
    begins in the middle of a batch would count up to a batch too much.
    """
    ends = _ends_of_batches(times)
    begin, end = MIDDLE
    positions = (int(len(times) * (begin + part * (end - begin) / 3) + 1e-9) for part in range(4))
    cuts = [ends[min(bisect_left(ends, position), len(ends) - 1)] for position in positions]
    thirds = [_rate(times, a, b) for a, b in itertools.pairwise(cuts) if b > a]
    middle = [end for end in ends if cuts[0] <= end <= cuts[-1]]
    if len(middle) < 3:  # too few batches for a middle part
        rate = _rate(times, 0, len(times) - 1) if len(ends) > 1 else len(times) / max(times[-1], 1e-9)
        return rate, rate, rate
    rate = statistics.linear_regression([times[end] for end in middle], middle).slope
    return rate, min(rate, *thirds), max(rate, *thirds)


def _rate(times: Sequence[float], first: int, last: int) -> float:
    return (last - first) / max(times[last] - times[first], 1e-9)


def _ends_of_batches(times: Sequence[float]) -> list[int]:
    """The positions before gaps that are not much shorter than the average of the middle half. Images of a
    batch follow each other faster than that."""
    first, last = len(times) // 4, len(times) * 3 // 4
    average = (times[last] - times[first]) / max(1, last - first)
    gaps = [end for end, (a, b) in enumerate(itertools.pairwise(times)) if b - a > average / 2]
    return [*gaps, len(times) - 1]
