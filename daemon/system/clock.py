"""The time of day, without changes of the clock since this process began.

It is used for waiting. A clock may be set back by an hour or forward by a year at any moment;
only the monotonic clock knows how much time has passed.
"""

from __future__ import annotations

import time

_BEGINNING = time.time() - time.monotonic()


def steady_seconds() -> float:
    """Unix seconds."""
    return _BEGINNING + time.monotonic()
