"""The rate of a daemon, from the times at which images were finished."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence


def measure_rate(times: Sequence[float]) -> tuple[float, float, float]:
    """Images per second in the middle half: the slope of a line through the ends of batches. Also the lowest
    and highest rate of its thirds.

    times: when each image was finished, in order. Images of a batch are finished together, so a part that
    begins in the middle of a batch would count up to a batch too much.
    """
    ends = _ends_of_batches(times)
    cuts = [_first_from(ends, len(times) * part // 12) for part in (3, 5, 7, 9)]
    thirds = [_rate(times, a, b) for a, b in itertools.pairwise(cuts) if b > a]
    middle = [end for end in ends if cuts[0] <= end <= cuts[-1]]
    if len(middle) < 3:  # too few batches for a middle part
        rate = _rate(times, 0, len(times) - 1)
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


def _first_from(ends: Sequence[int], position: int) -> int:
    return next(end for end in ends if end >= position or end == ends[-1])
