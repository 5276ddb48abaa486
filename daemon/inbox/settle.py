"""Which files are whole. A file being written must not be read: it settles first.

A file is whole when it arrived by rename, or when size, times and inode have not changed for `settle_seconds`. On a local
file system the change time says so at first sight; on a network mount, whose clock is another machine's,
only watching does. So too for a while after the clock was set: a file that grows may look old by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from daemon.jobs import File, Version

STEP_SECONDS = 0.5  # by which the clock must have moved beside the monotonic one to have been set


@dataclass(frozen=True, slots=True)
class Patience:
    """How an inbox's files settle."""

    settle_seconds: float
    trusts_clock: bool  # whether change times come from this machine's clock


@dataclass(slots=True)
class _Wait:
    version: Version
    since: float  # monotonic seconds
    due: float


class Settling:
    """Files of one inbox seen but not yet whole. Bounded: what does not fit is left to the next scan, and until that begins
    `overflowed` says so.

    Times are passed in, so that nothing here waits: `now` is monotonic, `clock` Unix seconds.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.overflowed = False
        self._waiting: dict[bytes, _Wait] = {}
        self._offset: float | None = None  # of the clock, from the monotonic one
        self._set_at = -math.inf  # when the clock was seen to have been set (monotonic)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_room_again(self) -> bool:
        """Whether it is worth while to look for what did not fit, though some files may never settle."""
        return self.overflowed and len(self._waiting) <= self.limit // 2

    def is_whole(self, file: File, patience: Patience, now: float, clock: float, *, renamed: bool = False) -> bool:
        """Whether this version of the file may be read now; if not, it is remembered for `due`."""
        wait = self._waiting.get(file.path)
        if wait is None or wait.version != file.version:
            wait = _Wait(file.version, now, now)
        age = clock - file.version.ctime_ns / 1e9
        trusted = patience.trusts_clock and now - self._last_set(now, clock) >= patience.settle_seconds
        quiet = max(now - wait.since, age if trusted else 0.0)
        if renamed or not file.regular or quiet >= patience.settle_seconds:
            self._waiting.pop(file.path, None)
            return True
        wait.due = now + patience.settle_seconds - max(quiet, 0.0)
        if file.path in self._waiting or len(self._waiting) < self.limit:
            self._waiting[file.path] = wait
        else:
            self.overflowed = True
        return False

    def _last_set(self, now: float, clock: float) -> float:
        """When the clock was set for the last time, as far as that was seen (monotonic)."""
        offset = clock - now
        if self._offset is not None and abs(offset - self._offset) > STEP_SECONDS:
            self._set_at = now
        self._offset = offset
        return self._set_at

    def due(self, now: float) -> list[bytes]:
        """Paths of files that it is time to look at again."""
        return [path for path, wait in self._waiting.items() if wait.due <= now]

    def seconds_to_next(self, now: float) -> float | None:
        """How long until some file is due; None when none waits."""
        return max(0.0, min(wait.due for wait in self._waiting.values()) - now) if self._waiting else None

    def forget(self, path: bytes) -> None:
        """The file is no longer there."""
        self._waiting.pop(path, None)
