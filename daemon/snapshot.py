"""How things stand at one moment. Light to import: the commands want it before all else."""

from __future__ import annotations

from datetime import timedelta

import msgspec


class WorkerState(msgspec.Struct, frozen=True):
    name: str
    device: str
    state: str  # loading, ready, silent, waiting, closed
    batches: int
    cause: str  # why its last process went away
    shared: bool = False  # its GPU, with other workers side by side (MPS)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state at one moment; with running = False, as the ledger of a daemon that does not run tells it."""

    running: bool
    pending: int
    done: int
    failed: int  # files whose newest version FAILED; one that was replaced since needs nobody's attention
    skipped: int
    gone: int
    in_flight: int = 0
    ended_in_this_run: int = 0
    images_per_second: float = 0.0  # over the last half minute
    eta_seconds: float | None = None  # None while nothing moves
    obstacles: list[str] = []  # what cannot be read or written, and why; empty when all can
    slab_used_bytes: int = 0
    slab_size_bytes: int = 0
    workers: list[WorkerState] = []
    notices: dict[str, str] = {}  # stage → what to say beside its answers; only of those whose weights have a notice
    uptime_seconds: float = 0.0

    @property
    def loading(self) -> bool:
        """Whether nothing can be worked on yet, as every worker still loads its models."""
        return bool(self.workers) and all(worker.state == "loading" for worker in self.workers)

    def sentence(self) -> str:
        """One line for people."""
        parts = [f"{self.done} done", f"{self.failed} failed", f"{self.skipped} skipped", f"{self.pending} pending"]
        if self.running:
            parts.append("loading models" if self.loading else f"{self.images_per_second:g} images/s")
        if self.eta_seconds is not None and self.pending:
            parts.append(f"{timedelta(seconds=round(self.eta_seconds))} to go")
        return "; ".join([", ".join(parts), *self.obstacles, *([] if self.running else ["no daemon runs"])])
