"""A position for one worker on a device: what is needed to start a worker there, and how that goes. And the memory of a GPU
that this daemon's workers share with each other and with other programs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import anyio
import structlog
from anyio import to_thread

from daemon.core.hints import command
from daemon.core.messages import Beat, Setup
from daemon.layout.placement import CONTEXT_BYTES
from daemon.layout.profile import SAFETY
from daemon.monitoring.snapshot import WorkerState
from daemon.system.gpus import Gpu
from daemon.workers.mps import MpsServer
from daemon.workers.worker import Worker

log = structlog.get_logger()

QUICK_DEATHS = 5  # in a row, without any answer, before a slot is closed
SILENCE_SECONDS = 10.0  # without a heartbeat, after which a worker counts as silent
TAKEN_BYTES = 256 << 20  # by others, from which they may be the reason why an image does not fit
FIRST_PAUSE_SECONDS = 2.0  # before the next attempt; doubles with each further one
LONGEST_PAUSE_SECONDS = 30.0


@dataclass(slots=True)
class Slot:
    setup: Setup
    device: str
    environment: dict[str, str]
    server: MpsServer | None = None  # shares the GPU with other slots
    state: str = "loading"  # loading, ready, waiting (before a restart), closed
    worker: Worker | None = None
    quick_deaths: int = 0
    lone_deaths: int = 0
    last_cause: str = ""
    unusable: bool = False  # its stages cannot be built; last_cause says why
    room: Room | None = None  # the memory of its GPU; None for a CPU
    short: bool = False  # it has no worker, and waits for that memory
    full_until: float = 0.0  # monotonic seconds until which its images wait for memory; 0: they do not
    rests: int = 0  # in a row, without STEADY_BATCHES between them
    peak_bytes: int = 0  # the most that a worker of this slot had reserved
    looked_at: float = 0.0  # Unix seconds, when an earlier worker last found its answers right
    ready_at: float = 0.0  # Unix seconds; 0: no worker of this slot was ready yet

    def __post_init__(self) -> None:
        if self.room:
            self.room.slots.append(self)

    @property
    def healthy(self) -> bool:
        return self.shown_state == "ready"

    @property
    def shown_state(self) -> str:
        """As `state`; of one that is ready, also whether its worker waits for memory or is silent."""
        if self.state != "ready":
            return self.state
        if self.full:
            return "waiting"
        heard = self.worker is not None and time.monotonic() - self.worker.heard_at < SILENCE_SECONDS
        return "ready" if heard else "silent"

    @property
    def full(self) -> bool:
        """Whether not even one image fits beside its worker. It is not known any more when no attempt followed."""
        return time.monotonic() < self.full_until

    def has_stopped_sharing(self, worker: Worker) -> bool:
        """Whether its worker shared the GPU, and another one that did so was lost."""
        return worker.shared and not (self.server and self.server.shared)

    def note_loss(self, worker: Worker) -> None:
        """Its worker is lost; count that against the slot, if it is a quick death."""
        if worker.answered or worker.shared or worker.died_idle:
            self.quick_deaths = self.lone_deaths = 0
        elif worker.died_alone:
            self.lone_deaths += 1
        else:
            self.quick_deaths += 1
        if not worker.curable and not worker.shared:
            self.quick_deaths = QUICK_DEATHS
        self.last_cause, self.unusable = worker.why_it_ended(), worker.unusable
        self.looked_at = max(self.looked_at, worker.looked_at)
        if worker.wrong:
            self._note_wrong(worker)
        else:
            log.warning("worker lost", worker=worker.name, device=self.device, cause=self.last_cause)

    def _note_wrong(self, worker: Worker) -> None:
        """Report since when results of this slot may be wrong: since the last look that found nothing, or since its first
        worker was ready."""
        since = self.looked_at or self.ready_at
        log.error(
            "answers to known images are wrong",
            worker=worker.name,
            device=self.device,
            faults=worker.wrong,
            redo=command("redo", "--since", datetime.fromtimestamp(since, UTC).isoformat(timespec="seconds"))
            if since
            else "not needed: this slot has processed no images since the start",
        )

    def describe(self) -> WorkerState:
        worker = self.worker
        beat = worker.beat if worker else Beat(0)
        return WorkerState(
            name=self.setup.name,
            device=self.device,
            state=self.shown_state,
            batches=worker.answered if worker else 0,
            cause=self.last_cause,
            shared=worker is not None and worker.shared,
            stages=[spec.name for spec in self.setup.stages],
            stages_loaded=worker.stages_loaded if worker else [],
            short_of_memory=self.short or self.full,
            memory_bytes=beat.resident_bytes,
            gpu_bytes=beat.device_used_bytes,
            gpu_allocated_bytes=beat.device_allocated_bytes,
            gpu_peak_bytes=max(self.peak_bytes, beat.device_peak_bytes),
            ready_at=self.ready_at,
            threads=self.setup.threads,
            busy=worker.busy if worker else 0,
        )


# NVML does not say in each system which process uses how much, so what others have taken since the daemon was started is the
# difference of two sums: what is in use now, less what was in use before there were workers, less what the workers use.
class Room:
    """The memory of a GPU, or of the GPUs of a group together, because an error does not show which of them is full.
    All pools of an executor with workers there share it.

    gpus: as they were before there were workers. alone: whether nobody else in this daemon has workers on them. What
    those use is not known here, so they would count as other programs.
    """

    def __init__(self, gpus: Sequence[Gpu], look: Callable[[], Sequence[Gpu]], *, alone: bool = True) -> None:
        self.slots: list[Slot] = []  # of all these pools
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
        workers = [slot.worker for slot in self.slots if slot.worker]
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
