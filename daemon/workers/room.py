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

from daemon.placement import CONTEXT_BYTES
from daemon.profile import SAFETY
from daemon.system.gpus import Gpu
from daemon.workers.worker import Worker

TAKEN_BYTES = 256 << 20  # by others, from which they may be the reason why an image does not fit
FIRST_PAUSE_SECONDS = 2.0  # before the next attempt; doubles with each further one
LONGEST_PAUSE_SECONDS = 30.0


class Occupant(Protocol):
    """A seat on the GPU."""

    worker: Worker | None


class Room:
    """The memory of one GPU, for all pools of a station that have workers there.

    gpu: as it was before there were workers. alone: whether no other station has workers on it. What those use
    is not known here, so they would count as other programs.
    """

    def __init__(self, gpu: Gpu, look: Callable[[], Sequence[Gpu]], *, alone: bool = True) -> None:
        self.seats: list[Occupant] = []  # of all these pools
        self._before = gpu
        self._look = look
        self._alone = alone
        self._pause = FIRST_PAUSE_SECONDS
        self.judging = anyio.Lock()  # one lack of memory is dealt with at a time
        self.starting = anyio.Lock()  # of the workers that come back, one starts at a time

    async def measure_free(self) -> int | None:
        """Bytes; None if the driver does not answer."""
        gpu = await self._now()
        return gpu.free_bytes if gpu else None

    async def measure_taken(self) -> int:
        """Bytes that other programs have taken; 0 if that cannot be known."""
        gpu = await self._now() if self._alone else None
        workers = [seat.worker for seat in self.seats if seat.worker]
        ours = sum(worker.beat.device_used_bytes + CONTEXT_BYTES for worker in workers)
        return gpu.used_bytes - self._before.used_bytes - ours if gpu else 0

    def next_pause(self) -> float:
        """Seconds until another attempt."""
        pause, self._pause = self._pause, min(LONGEST_PAUSE_SECONDS, 2 * self._pause)
        return pause

    def note_fit(self) -> None:
        self._pause = FIRST_PAUSE_SECONDS

    async def _now(self) -> Gpu | None:
        gpus = await to_thread.run_sync(self._look)
        return next((gpu for gpu in gpus if gpu.uuid == self._before.uuid), None)


def need_for(peaks: Iterable[int]) -> int:
    """Bytes that must be free before a worker is started. peaks: what workers of this kind had reserved."""
    return math.ceil(SAFETY * (max(peaks, default=0) + CONTEXT_BYTES))
