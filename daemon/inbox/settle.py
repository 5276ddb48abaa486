"""Which files are complete. A file that is still being written must not be read; it has to settle first.

A file is whole if it arrived by rename and its contents are new, or if its size, times and inode have not changed for
`settle_seconds`. On a local file system its change time shows that at once. On a network mount, which uses
another machine's clock, the file has to be watched for that long. The same is true for a while after the
clock was set: a file that is growing may seem old.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from daemon.core.jobs import File, Version

# If only a file's change time is new, wait at least this long: the daemon may be moving or deleting it, and a rename sets
# that time shortly before the name changes.
TOUCHED_SECONDS = 1.0
STEP_SECONDS = 0.5  # the clock was set if it moved by this much against the monotonic clock


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
    """Files of one inbox that were seen but are not whole yet. Bounded: what does
    not fit is left to the next scan; until that begins, `overflowed` is true.

    Times are passed in, so nothing here waits: `now` is monotonic, `clock` is Unix seconds.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.overflowed = False
        self._waiting: dict[bytes, _Wait] = {}
        self._offset: float | None = None  # of the clock from the monotonic clock
        self._set_at = -math.inf  # when the clock was seen to have been set (monotonic)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, path: bytes) -> bool:
        return path in self._waiting

    @property
    def has_room_again(self) -> bool:
        """Whether to scan again for files that did not fit. Some files may never settle,
        so this does not wait for all."""
        return self.overflowed and len(self._waiting) <= self.limit // 2

    def is_whole(
        self,
        file: File,
        patience: Patience,
        now: float,
        clock: float,
        *,
        renamed: bool = False,
        touched: bool = False,
        read_by: float = 0.0,
    ) -> bool:
        """Whether this version of the file may be read now. If not, `due` returns it later.

        now, clock: before its status was read, as it may have changed since then. read_by: afterwards
        (monotonic; 0: at the same time). The file is watched from then on. touched: only its change time is new.
        """
        wait = self._waiting.get(file.path)
        if wait is None or wait.version != file.version:
            wait = _Wait(file.version, max(now, read_by), now)
        settle = max(patience.settle_seconds, TOUCHED_SECONDS if touched else 0.0)
        age = clock - file.version.ctime_ns / 1e9
        trusted = patience.trusts_clock and now - self._last_set(now, clock) >= settle
        quiet = max(now - wait.since, age if trusted else 0.0, 0.0)
        if (renamed and not touched) or not file.regular or quiet >= settle:
            self._waiting.pop(file.path, None)
            return True
        wait.due = now + settle - quiet
        if file.path in self._waiting or len(self._waiting) < self.limit:
            self._waiting[file.path] = wait
        else:
            self.overflowed = True
        return False

    def _last_set(self, now: float, clock: float) -> float:
        """When the clock was last seen to have been set (monotonic)."""
        offset = clock - now
        if self._offset is not None and abs(offset - self._offset) > STEP_SECONDS:
            self._set_at = now
        self._offset = offset
        return self._set_at

    def due(self, now: float) -> list[bytes]:
        """Paths of files that have to be checked again now."""
        return [path for path, wait in self._waiting.items() if wait.due <= now]

    def seconds_to_next(self, now: float) -> float | None:
        """Seconds until the next file is due; None if none waits."""
        return max(0.0, min(wait.due for wait in self._waiting.values()) - now) if self._waiting else None

    def forget(self, path: bytes) -> None:
        """The file is no longer there."""
        self._waiting.pop(path, None)
