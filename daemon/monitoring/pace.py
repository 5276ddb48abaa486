"""How fast images are finished, and how long the others will take."""

from __future__ import annotations

from collections import deque

from daemon.monitoring.counts import Counts

RATE_SECONDS = 30.0  # over which the rate is measured


class Pace:
    """Learns from each call of `rate`."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._samples: deque[tuple[float, int]] = deque()  # times, and images that had been finished

    def rate(self, now: float) -> float:
        """Images per second in the last RATE_SECONDS, or since an earlier call. now: monotonic seconds."""
        self._samples.append((now, self._counts.worked))
        while now - self._samples[0][0] > RATE_SECONDS:
            self._samples.popleft()
        return self._rate_since(*self._samples[0], now)

    def seconds_for(self, images: int, now: float) -> float | None:
        """None while nothing is finished. Call `rate` before it. The time before these images came does not count: nothing was
        to be done."""
        then, before = max(self._samples[0], (self._counts.began_at, self._counts.worked_before))
        rate = self._rate_since(then, before, now) or self._rate_since(*self._samples[0], now)
        return images / rate if rate else None

    def _rate_since(self, then: float, before: int, now: float) -> float:
        return (self._counts.worked - before) / (now - then) if now > then else 0.0
