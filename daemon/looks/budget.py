"""Limits the rate of a second look: a token bucket."""

from __future__ import annotations

import time
from collections.abc import Callable

# The bucket's size. At most the images of one second are taken at once; the rest makes up for the time until that is noticed.
SECONDS = 1.25


class Budget:
    """At most `rate` images/s; 0: no limit."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: monotonic seconds."""
        self.rate = rate
        self._clock = clock
        self._most = max(1, int(rate))
        self._size = SECONDS * max(1.0, rate)
        self._left = max(1.0, rate)
        self._at = clock()

    def most(self, wanted: int) -> int:
        """The most images that can be taken at once: this number, or fewer if the rate allows fewer."""
        return min(wanted, self._most) if self.rate else wanted

    def room(self, most: int) -> int:
        """How many images may be taken now, at most this number."""
        if not self.rate:
            return most
        now = self._clock()
        self._left = min(self._size, self._left + (now - self._at) * self.rate)
        self._at = now
        return min(most, self._most, int(self._left))

    def take(self, images: int) -> None:
        if self.rate:
            self._left -= images

    def seconds_to(self, images: int) -> float:
        """Seconds until there is room for this many images."""
        return max(0.0, (images - self._left) / self.rate) if self.rate else 0.0
