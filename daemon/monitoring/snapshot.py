"""The state of the daemon at one moment. Imports nothing heavy, as every command needs it."""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import timedelta

import msgspec

from daemon.config.values import members_of
from daemon.core.hints import command, quantity
from daemon.core.jobs import Outdated
from daemon.monitoring.limits import Limit, Moment
from daemon.system.log import LogLine

TASKS = (
    "verify",
    "backup",
    "upload",
    "forget",
    "prune",
    "vacuum",
)  # of upkeep, in the order in which they run


class WorkerState(msgspec.Struct, frozen=True):
    name: str
    device: str
    state: str  # loading, ready, silent, waiting, closed
    batches: int
    cause: str  # why its last process ended
    shared: bool = False  # whether it shares its GPU with other workers (MPS)
    stages: list[str] = []
    stages_loaded: list[str] = []
    short_of_memory: bool = False  # it waits for memory of its GPU; cause says why
    memory_bytes: int = 0  # of the host that its process uses
    gpu_bytes: int = 0  # that it has reserved
    gpu_allocated_bytes: int = 0  # of these, in tensors
    gpu_peak_bytes: int = 0  # the most that it had
    ready_at: float = 0.0  # when its last process was ready, in Unix seconds; 0: none was yet
    threads: int = 0
    busy: int = 0  # of its threads, that have a batch

    @property
    def problem(self) -> str:
        """Its last problem; if it is ready again, since when."""
        if not (self.cause and self.ready_at and self.state == "ready"):
            return self.cause
        return f"{self.cause}; ready again since {time.strftime('%Y-%m-%d %H:%M', time.localtime(self.ready_at))}"

    @property
    def progress(self) -> str:
        """Its state; while it loads, also which stages are loaded."""
        if self.state != "loading":
            return self.state
        return f"loading: {describe_loading(self.stages, set(self.stages_loaded))}"


def describe_loading(stages: list[str], loaded: Collection[str]) -> str:
    """ "ocr, yolo loaded; clip, blip to go"."""
    done = [stage for stage in stages if stage in loaded]
    left = [stage for stage in stages if stage not in loaded]
    parts = [f"{', '.join(done)} loaded"] if done else []
    return "; ".join([*parts, f"{', '.join(left)} to go" if left else "first test run"])


class BatcherState(msgspec.Struct, frozen=True):
    """A segment at work in an executor. queued: images that wait for a worker. batch_size: images in a full batch."""

    name: str
    queued: int
    workers: list[WorkerState]
    batch_size: int = 1


class ExecutorState(msgspec.Struct, frozen=True, kw_only=True):
    """What an executor knows of itself. The slab in bytes; progressed_at: when a batch last began or ended,
    in monotonic seconds; blocked: why nothing can be read or written. waits_for_room: in the slab, for the
    next image. is_backed_up: no more results can be taken until some are published."""

    batchers: list[BatcherState]
    slab_used: int
    slab_size: int
    progressed_at: float
    blocked: list[str] = []
    waits_for_room: bool = False
    is_backed_up: bool = False


class SegmentState(msgspec.Struct, frozen=True):
    """A segment of all executors together. queued: images that wait for a worker."""

    name: str
    queued: int


class StageState(msgspec.Struct, frozen=True):
    """What a stage has done since the daemon started. seconds: of its batches. reused: results of the ledger."""

    name: str
    images: int
    seconds: float
    reused: int


class GpuState(msgspec.Struct, frozen=True):
    """A GPU, as the driver describes it. busy: 0 to 1. None: the driver does not report it."""

    device: str
    name: str
    used_bytes: int
    total_bytes: int
    busy: float | None = None
    celsius: int | None = None
    uuid: str = ""


class UpkeepRun(msgspec.Struct, frozen=True, kw_only=True):
    """The last run of an upkeep task. Times are Unix seconds; None: never."""

    task: str  # one of TASKS
    tried_at: float | None = None
    succeeded_at: float | None = None
    seconds: float = 0.0  # duration of the last run
    outcome: str = ""  # of the last run: done, failed, or stopped early
    detail: str = ""  # what was done, or why not

    @property
    def failure(self) -> str:
        """A sentence if the last run failed; otherwise empty."""
        return f"upkeep: {self.task} failed: {self.detail}" if self.outcome == "failed" else ""


class SinkState(msgspec.Struct, frozen=True, kw_only=True):
    """A sink, and how far it has come."""

    name: str
    behind: int  # records that it does not have yet
    succeeded_at: float | None = None  # Unix seconds: when it last took records; None: never
    problem: str = ""  # why it does not take records now, in a sentence
    configured: bool = True  # if not, the next start of the daemon forgets it
    earlier: int = 0  # images that were DONE before it was turned on, until it takes its first record


class LookState(msgspec.Struct, frozen=True, kw_only=True):
    """A second look. waiting, done, failed: images in the ledger."""

    name: str
    stage: str = ""  # empty: it is not in the configuration
    model: str = ""
    waiting: int
    done: int
    failed: int
    in_flight: int = 0
    problem: str = ""  # why no image gets it now, in a sentence


def describe_behind(sink: str, behind: int, why: str) -> str:
    """The problem of a sink; empty if there is none."""
    return f"sink {sink}: {behind:,} record{'s' * (behind != 1)} behind: {why}" if why else ""


def describe_earlier(images: int) -> str:
    """How sinks that are new get the images that are DONE already."""
    are = "is" if images == 1 else "are"
    redo = f"type `{command('redo', '--all')}`: no model that has not changed runs again"
    return f"For {quantity(images, 'image')} that {are} DONE already, {redo}"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state at one moment. running = False: no daemon is running, and only what the ledger,
    upkeep.json and the outputs of the sinks show is filled in."""

    running: bool
    pending: int
    done: int
    failed: int  # files whose newest version FAILED; an older one needs no attention
    skipped: int
    gone: int
    in_flight: int = 0
    ended_in_this_run: int = 0
    left_in_this_run: int = 0  # pending images that this run will process; with --limit not all
    images_per_second: float = 0.0  # of the workers that are ready now, over the last half minute at most
    # finished in each of the last minutes since the daemon's start, 60 at most, oldest first; the last one goes on
    minutes: list[int] = []
    eta_seconds: float | None = None  # None while nothing is processed
    obstacles: list[str] = []  # what cannot be read or written, and why
    unread_folders: int = 0  # in the inboxes; they are skipped
    # the first of them, each with its cause; empty on the public pages, which name no files
    unread: list[str] = []
    slab_used_bytes: int = 0
    slab_size_bytes: int = 0
    sinks: list[SinkState] = []
    second_looks: list[LookState] = []
    workers: list[WorkerState] = []
    segments: list[SegmentState] = []
    stages: list[StageState] = []
    gpus: list[GpuState] = []
    limit: Limit = Limit()  # of the last ten seconds
    moment: Moment | None = None  # what was measured last
    notices: dict[str, str] = {}  # by stage
    settings_digest: str = ""  # of the models, thresholds and rule that the daemon was started with
    uptime_seconds: float = 0.0
    upkeep: list[UpkeepRun] = []  # tasks that are enabled or have run before
    # files with results of other models than the current ones; None: not counted yet
    outdated: Outdated | None = None
    # the last warnings and errors of the daemon's own process; empty for readers of [http] and /api/status, as they name files
    log: list[LogLine] = []
    reload_problem: str = ""  # why the last reload was refused
    # the process that uses the state folder although no daemon answers; 0: none, or unknown
    held_by: int = 0

    def without_names(self) -> Snapshot:
        """For readers who should not see what files and folders in an inbox are called."""
        return msgspec.structs.replace(self, unread=[], log=[])

    def memory_on(self, uuid: str) -> tuple[int, int] | tuple[None, None]:
        """Bytes that the workers have in tensors on this GPU, and that they have reserved there. None: the daemon does not see
        this GPU, or it has workers of several GPUs, which report the sum."""
        device = next((gpu.device for gpu in self.gpus if gpu.uuid == uuid), None)
        there = [worker for worker in self.workers if device in members_of(worker.device)]
        if not device or any(worker.device != device for worker in there):
            return None, None
        return sum(worker.gpu_allocated_bytes for worker in there), sum(worker.gpu_bytes for worker in there)

    @property
    def loading(self) -> bool:
        """Whether every worker still loads its models, so that nothing can be processed yet."""
        return bool(self.workers) and all(worker.state == "loading" for worker in self.workers)

    def loading_sentence(self) -> str:
        """Which stages are loaded: those that every worker that has them has loaded."""
        stages = dict.fromkeys(stage for worker in self.workers for stage in worker.stages)
        missing = {
            stage for worker in self.workers for stage in worker.stages if stage not in worker.stages_loaded
        }
        count = f"{self._count_ready()}; " if len(self.workers) > 1 else ""
        return f"loading models: {count}{describe_loading(list(stages), stages.keys() - missing)}"

    def some_loading(self) -> str:
        """How many workers are ready, if some are and others still load; otherwise empty."""
        states = [worker.state for worker in self.workers]
        return self._count_ready() if "loading" in states and not self.loading else ""

    def looks_sentence(self) -> str:
        """How many images wait for second looks; empty if none do."""
        waiting = sum(look.waiting for look in self.second_looks)
        return f"{waiting:,} second look{'s' * (waiting != 1)} to do" if waiting else ""

    def outdated_sentence(self) -> str:
        """How many files have results of models that are not used any more, and what to type; empty if none have."""
        if not self.outdated:
            return ""
        files = self.outdated.files
        count = f"{'at least ' * self.outdated.at_least}{files:,} file{'s' * (files != 1)}"
        have = f"{count} {'has' if files == 1 else 'have'}" if files else "some files may have"
        redo = f"To process those whose files still exist again: `{command('redo', '--stale')}`"
        return f"{have} results of earlier models or options. {redo}"

    def new_sinks_sentence(self) -> str:
        """Which sinks are new and lack what is DONE already, and what to type; empty if none do."""
        new = [sink for sink in self.sinks if sink.earlier]
        if not new:
            return ""
        names = ", ".join(sink.name for sink in new)
        gets = f"The new sink {names} gets" if len(new) == 1 else f"The new sinks {names} get"
        return f"{gets} images that finish from now on. {describe_earlier(new[0].earlier)}."

    def refusal_sentence(self) -> str:
        """Why the daemon works with another configuration than the last reload asked for; empty if it does not."""
        if not self.reload_problem:
            return ""
        return f"the last reload was refused, so the daemon works with the settings that it had: {self.reload_problem}"

    def _count_ready(self) -> str:
        return (
            f"{sum(worker.state == 'ready' for worker in self.workers)} of {len(self.workers)} workers ready"
        )

    def sentence(self) -> str:
        """One line for people."""
        parts = [
            f"{self.done} done",
            f"{self.failed} failed",
            f"{self.skipped} skipped",
            f"{self.pending} pending",
        ]
        if self.running:
            parts.append(self.loading_sentence() if self.loading else f"{self.images_per_second:g} images/s")
            parts.append(self.some_loading())
        parts.append(self.looks_sentence())
        if self.eta_seconds is not None and self.pending:
            parts.append(f"{timedelta(seconds=round(self.eta_seconds))} to go")
        unread = f"{self.unread_folders:,} folder{'s' * (self.unread_folders != 1)} in inboxes cannot be read"
        problems = [*self.obstacles, unread if self.unread_folders else ""]
        problems += [run.failure for run in self.upkeep]
        problems += [self.refusal_sentence(), "" if self.running else self.absence_sentence()]
        return "; ".join(filter(None, (", ".join(filter(None, parts)), *problems)))

    def absence_sentence(self) -> str:
        """Why there is no daemon to ask."""
        if not self.held_by:
            return "no daemon is running"
        return f"no daemon answers yet: process {self.held_by} uses the state folder (a daemon that is starting, or a command)"
