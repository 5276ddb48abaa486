"""A position for one worker on a device: what is needed to start a worker there, and how that goes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from daemon.core.hints import command
from daemon.core.messages import Beat, Setup
from daemon.monitoring.snapshot import WorkerState
from daemon.workers.mps import MpsServer
from daemon.workers.room import Room
from daemon.workers.worker import Worker

log = structlog.get_logger()

QUICK_DEATHS = 5  # in a row, without any answer, before a seat is closed
SILENCE_SECONDS = 10.0  # without a heartbeat, after which a worker counts as silent


@dataclass(slots=True)
class Seat:
    setup: Setup
    device: str
    environment: dict[str, str]
    server: MpsServer | None = None  # shares the GPU with other seats
    state: str = "loading"  # loading, ready, waiting (before a restart), closed
    worker: Worker | None = None
    quick_deaths: int = 0
    lone_deaths: int = 0
    last_cause: str = ""
    unusable: bool = False  # its stages cannot be built; last_cause says why
    room: Room | None = None  # the memory of its GPU; None for a CPU
    short: bool = False  # it has no worker, and waits for that memory
    full_until: float = (
        0.0  # monotonic seconds until which its worker's images wait for memory; 0: they do not
    )
    rests: int = 0  # in a row, without STEADY_BATCHES between them
    peak_bytes: int = 0  # the most that a worker of this seat had reserved
    looked_at: float = 0.0  # Unix seconds, when an earlier worker last found its answers right
    ready_at: float = 0.0  # Unix seconds; 0: no worker of this seat was ready yet

    def __post_init__(self) -> None:
        if self.room:
            self.room.seats.append(self)

    @property
    def healthy(self) -> bool:
        worker = self.worker
        return (
            self.state == "ready"
            and not self.full
            and worker is not None
            and time.monotonic() - worker.heard_at < SILENCE_SECONDS
        )

    @property
    def full(self) -> bool:
        """Whether not even one image fits beside its worker. It is not known any more when no attempt followed."""
        return time.monotonic() < self.full_until

    def note_loss(self, worker: Worker) -> None:
        """Its worker is lost; count that against the seat, if it is a quick death."""
        if worker.answered or worker.shared:
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
        """Report since when results of this seat may be wrong: since the last look that found nothing, or since its first
        worker was ready."""
        since = self.looked_at or self.ready_at
        log.error(
            "answers to known images are wrong",
            worker=worker.name,
            device=self.device,
            faults=worker.wrong,
            redo=command("redo", "--since", datetime.fromtimestamp(since, UTC).isoformat(timespec="seconds"))
            if since
            else "nothing: no worker of this seat has had images since the start",
        )

    def describe(self) -> WorkerState:
        worker = self.worker
        beat = worker.beat if worker else Beat(0)
        state = self.state
        if state == "ready" and not self.healthy:
            state = "waiting" if self.full else "silent"
        return WorkerState(
            name=self.setup.name,
            device=self.device,
            state=state,
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
