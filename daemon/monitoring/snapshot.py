"""How things stand at one moment. Light to import: the commands want it before all else."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import msgspec

TASKS = ("verify", "backup", "prune", "vacuum")  # of upkeep, in the order in which they are done


class WorkerState(msgspec.Struct, frozen=True):
    name: str
    device: str
    state: str  # loading, ready, silent, waiting, closed
    batches: int
    cause: str  # why its last process went away
    shared: bool = False  # its GPU, with other workers side by side (MPS)
    stages: list[str] = []
    stages_loaded: list[str] = []  # those that have their models

    @property
    def progress(self) -> str:
        """Its state; while it loads, with the stages that have their models and those that have not."""
        if self.state != "loading":
            return self.state
        return f"loading: {describe_loading(self.stages, set(self.stages_loaded))}"


def describe_loading(stages: list[str], loaded: Collection[str]) -> str:
    """ "ocr, yolo loaded; clip, blip to go"."""
    done = [stage for stage in stages if stage in loaded]
    left = [stage for stage in stages if stage not in loaded]
    parts = [f"{', '.join(done)} loaded"] if done else []
    return "; ".join([*parts, f"{', '.join(left)} to go" if left else "trying them out"])


class Chore(msgspec.Struct, frozen=True, kw_only=True):
    """A task of upkeep, as it was done last. Times are Unix seconds; None: never."""

    task: str  # verify, backup, prune or vacuum
    tried_at: float | None = None
    succeeded_at: float | None = None
    seconds: float = 0.0  # that the last try took
    outcome: str = ""  # of the last try: done, failed, or stopped before it was done
    detail: str = ""  # what was done, or why not

    @property
    def failure(self) -> str:
        """A sentence where the last try failed; else empty."""
        return f"upkeep: {self.task} failed: {self.detail}" if self.outcome == "failed" else ""


class SinkState(msgspec.Struct, frozen=True, kw_only=True):
    """An output beside the sidecars, and how far it has come."""

    name: str
    behind: int  # records that it does not have yet
    succeeded_at: float | None = None  # Unix seconds: when it last took records; None: never
    problem: str = ""  # why it does not take records at present, in a sentence


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
    left_in_this_run: int = 0  # of those pending: with --limit not all
    images_per_second: float = 0.0  # over the last half minute
    eta_seconds: float | None = None  # None while nothing moves
    obstacles: list[str] = []  # what cannot be read or written, and why; empty when all can
    unread_folders: int = 0  # in the inboxes; work goes on without them
    unread: list[str] = []  # the first of them, each with its cause; not on the public pages, which name no files
    slab_used_bytes: int = 0
    slab_size_bytes: int = 0
    sinks: list[SinkState] = []
    workers: list[WorkerState] = []
    notices: dict[str, str] = {}  # stage → what to say beside its answers; only of those whose weights have a notice
    settings_digest: str = ""  # of the models, thresholds and rule that the daemon was started with
    uptime_seconds: float = 0.0
    upkeep: list[Chore] = []  # tasks that are on, or that were once

    @property
    def loading(self) -> bool:
        """Whether nothing can be worked on yet, as every worker still loads its models."""
        return bool(self.workers) and all(worker.state == "loading" for worker in self.workers)

    def loading_sentence(self) -> str:
        """How far the workers have come with their models: a stage is loaded when all workers that have it have loaded it."""
        stages = dict.fromkeys(stage for worker in self.workers for stage in worker.stages)
        missing = {stage for worker in self.workers for stage in worker.stages if stage not in worker.stages_loaded}
        count = f"{self._count_ready()}; " if len(self.workers) > 1 else ""
        return f"loading models: {count}{describe_loading(list(stages), stages.keys() - missing)}"

    def some_loading(self) -> str:
        """How many workers are ready, while the work has begun and others still load; else nothing."""
        states = [worker.state for worker in self.workers]
        return self._count_ready() if "loading" in states and not self.loading else ""

    def _count_ready(self) -> str:
        return f"{sum(worker.state == 'ready' for worker in self.workers)} of {len(self.workers)} workers ready"

    def sentence(self) -> str:
        """One line for people."""
        parts = [f"{self.done} done", f"{self.failed} failed", f"{self.skipped} skipped", f"{self.pending} pending"]
        if self.running:
            parts.append(self.loading_sentence() if self.loading else f"{self.images_per_second:g} images/s")
            parts += [count] if (count := self.some_loading()) else []
        if self.eta_seconds is not None and self.pending:
            parts.append(f"{timedelta(seconds=round(self.eta_seconds))} to go")
        unread = f"{self.unread_folders:,} folder{'s' * (self.unread_folders != 1)} in inboxes cannot be read"
        problems = [*self.obstacles, *([unread] if self.unread_folders else [])]
        problems += [chore.failure for chore in self.upkeep if chore.failure]
        return "; ".join([", ".join(parts), *problems, *([] if self.running else ["no daemon runs"])])
