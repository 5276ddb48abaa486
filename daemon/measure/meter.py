"""Measures the machine while a daemon works: load of the GPUs, memory, CPU time by kind of process, and what the daemon says
of its queues."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from types import TracebackType

import msgspec
import psutil

from daemon.config.loading import Config
from daemon.system.gpus import list_gpus
from daemon.terminal.control import find_snapshot

INTERVAL_SECONDS = 0.25
LOOK_SECONDS = 1.0  # between two questions to the daemon, which cost it time
DECODERS, WORKERS, DAEMON = (
    "decoders",
    "workers",
    "daemon",
)  # kinds of process; the page's counts as the daemon
MODULES = {"stages.images.decoder": DECODERS, "daemon.workers.child": WORKERS}


class LoadSample(msgspec.Struct, frozen=True):
    """Figures at one moment. Lists have an entry for each GPU."""

    at: float  # seconds since the daemon was started
    gpu_utilisation: list[float | None]  # 0..1
    gpu_used_bytes: list[int]
    daemon_bytes: int  # anonymous memory, without the slab and mapped files
    workers_bytes: int  # all the daemon's children together
    cpu_seconds: dict[str, float] = {}  # so far, by kind of process; those that have ended count too
    decoders: int = 0  # processes


class StatusSample(msgspec.Struct, frozen=True):
    """What the daemon says of itself at one moment, in images."""

    at: float  # seconds since the daemon was started
    unread: int  # wait to be read
    in_flight: int  # are read and not finished
    queued: int  # of those, wait for a worker
    slab_share: float  # of the memory for images in flight, 0..1
    stage_seconds: float  # of all stages so far
    workers: int  # that are ready
    devices: list[str]


class Meter:
    """Within its context, a thread takes samples of a daemon's process."""

    def __init__(self, pid: int, config: Config) -> None:
        self.samples: list[LoadSample] = []
        self.devices: list[str] = []  # the GPUs of the samples
        self.looks: list[StatusSample] = []
        self.started = time.time()
        # Unix seconds: when the first worker was ready. Until that is known, the last time that none was.
        self.loaded_at = self.started
        self._loading = True
        self._looked_at = 0.0
        self.threads_per_worker = config.pipeline.threads_per_worker
        self._config = config
        self._process = psutil.Process(pid)
        self._spent: dict[psutil.Process, tuple[str, float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="meter")

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_SECONDS):
            now = time.time()
            if self._loading or now >= self._looked_at + LOOK_SECONDS:
                self._look(now)
            try:
                self.samples.append(self._take(now - self.started))
            except psutil.NoSuchProcess:
                return

    def _look(self, now: float) -> None:
        self._looked_at = now
        snapshot = find_snapshot(self._config)
        if self._loading:
            self._loading = snapshot is None or bool(snapshot.loading)
            ready_at = [worker.ready_at for worker in snapshot.workers if worker.ready_at] if snapshot else []
            self.loaded_at = now if self._loading else min(ready_at, default=self.loaded_at)
        if snapshot and not self._loading:
            ready = [worker.device for worker in snapshot.workers if worker.state == "ready"]
            self.looks.append(
                StatusSample(
                    at=now - self.started,
                    unread=max(0, snapshot.pending - snapshot.in_flight),
                    in_flight=snapshot.in_flight,
                    queued=sum(segment.queued for segment in snapshot.segments),
                    slab_share=snapshot.slab_used_bytes / max(1, snapshot.slab_size_bytes),
                    stage_seconds=sum(stage.seconds for stage in snapshot.stages),
                    workers=len(ready),
                    devices=sorted({part for device in ready for part in device.split("+")}),
                )
            )

    def _take(self, at: float) -> LoadSample:
        gpus = list_gpus()
        self.devices = [gpu.device for gpu in gpus]
        children = self._process.children(recursive=True)
        decoders = sum(self._count_time(process) == DECODERS for process in [self._process, *children])
        spent: defaultdict[str, float] = defaultdict(float)
        for kind, seconds in self._spent.values():
            spent[kind] += seconds
        return LoadSample(
            at,
            [gpu.utilisation for gpu in gpus],
            [gpu.used_bytes for gpu in gpus],
            anonymous_bytes(self._process),
            sum(map(anonymous_bytes, children)),
            dict(spent),
            decoders,
        )

    def _count_time(self, process: psutil.Process) -> str:
        """Note its CPU time; returns its kind, or "" if it has ended."""
        try:
            words, times = process.cmdline(), process.cpu_times()
        except psutil.Error:
            return ""
        kind = next((MODULES[word] for word in words if word in MODULES), DAEMON)
        self._spent[process] = (kind, times.user + times.system)
        return kind


def anonymous_bytes(process: psutil.Process) -> int:
    """0 for a process that has just ended."""
    try:
        memory = process.memory_info()
    except psutil.NoSuchProcess:
        return 0
    return int(memory.rss - memory.shared)


def read_gpu_bytes() -> dict[str, int]:
    """In use on each GPU, by device."""
    return {gpu.device: gpu.used_bytes for gpu in list_gpus()}
