"""The memory of a GPU that this daemon's workers share with each other and with other programs.

NVML does not say in each system which process uses how much, so what others have taken since the daemon was
started is the difference of two sums: what is in use now, less what was in use before there were workers, less
what the workers use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import anyio
from anyio import to_thread

from daemon.placement.placement import CONTEXT_BYTES
from daemon.placement.profile import SAFETY
from daemon.system.gpus import Gpu
from daemon.workers.worker import Worker

TAKEN_BYTES = 256 << 20  # by others, from which they may be the reason why an image does not fit
FIRST_PAUSE_SECONDS = 2.0  # before the next attempt; doubles with each further one
LONGEST_PAUSE_SECONDS = 30.0


class Occupant(Protocol):
    """A seat on the GPU."""

    worker: Worker | None


class Room:
    """The memory of a GPU, or of the GPUs of a group together, because an error does not show which of them is full.
    All pools of a station with workers there share it.

    gpus: as they were before there were workers. alone: whether nobody else in this daemon has workers on them. What
    those use is not known here, so they would count as other programs.
    """

    def __init__(self, gpus: Sequence[Gpu], look: Callable[[], Sequence[Gpu]], *, alone: bool = True) -> None:
        self.seats: list[Occupant] = []  # of all these pools
        self.gpus = len(gpus)
        self._before = {gpu.uuid: gpu for gpu in gpus}
        self._look = look
        self._alone = alone
        self._pause = FIRST_PAUSE_SECONDS
        self.judging = anyio.Lock()  # one lack of memory is dealt with at a time
        self.starting = anyio.Lock()  # of the workers that come back, one starts at a time

    async def measure_free(self) -> int | None:
        """Bytes; None if the driver does not answer."""
        gpus = await self._now()
        return sum(gpu.free_bytes for gpu in gpus) if gpus else None

    async def measure_taken(self) -> int:
        """Bytes that other programs have taken; 0 if that cannot be known."""
        gpus = await self._now() if self._alone else []
        workers = [seat.worker for seat in self.seats if seat.worker]
        ours = sum(worker.beat.device_used_bytes + CONTEXT_BYTES * self.gpus for worker in workers)
        return sum(gpu.used_bytes - self._before[gpu.uuid].used_bytes for gpu in gpus) - ours if gpus else 0

    def next_pause(self) -> float:
        """Seconds until another attempt."""
        pause, self._pause = self._pause, min(LONGEST_PAUSE_SECONDS, 2 * self._pause)
        return pause

    def note_fit(self) -> None:
        self._pause = FIRST_PAUSE_SECONDS

    async def _now(self) -> list[Gpu]:
        """Empty if the driver does not show all of them."""
        gpus = [gpu for gpu in await to_thread.run_sync(self._look) if gpu.uuid in self._before]
        return gpus if len(gpus) == self.gpus else []


def need_for(peaks: Iterable[int], gpus: int = 1) -> int:
    """Bytes that must be free before a worker is started. peaks: what workers of this kind had reserved. gpus: that
    one worker uses."""
    return math.ceil(SAFETY * (max(peaks, default=0) + CONTEXT_BYTES * gpus))
