"""Measures the machine while a daemon works: GPUs, memory and CPU time; and collects what the daemon measures itself."""

from __future__ import annotations

import contextlib
import glob
import os
import threading
import time
from collections.abc import Iterable

import msgspec
import psutil

from daemon.config.loading import Config
from daemon.monitoring.limits import Moment
from daemon.monitoring.processes import CpuTimes
from daemon.server.control import find_snapshot
from daemon.system.gpus import list_gpus

INTERVAL_SECONDS = 0.25
LOOK_SECONDS = 1.0  # between two questions to the daemon, which cost it time


class LoadSample(msgspec.Struct, frozen=True):
    """Figures at one moment. Lists have an entry for each GPU."""

    at: float  # seconds since the daemon was started
    gpu_utilisation: list[float | None]  # 0..1
    gpu_used_bytes: list[int]
    daemon_bytes: int  # anonymous memory, without the slab and mapped files
    workers_bytes: int  # all the daemon's children together
    shared_bytes: int = 0  # the slabs and the decoders' pixels, each once

    @property
    def host_bytes(self) -> int:
        """Of all processes together, without mapped files. What they share counts once."""
        return self.daemon_bytes + self.workers_bytes + self.shared_bytes


class Meter:
    """Within its context, a thread takes samples of a daemon's process."""

    def __init__(self, pid: int, config: Config) -> None:
        self.samples: list[LoadSample] = []
        self.devices: list[str] = []  # the GPUs of the samples
        self.moments: list[Moment] = []  # by the daemon's own measurement
        self.cpu_seconds: dict[str, float] = {}  # so far, by kind of process; those that have ended count too
        self.started = time.time()
        # Unix seconds: when the first worker was ready. Until that is known, the last time that none was.
        self.loaded_at = self.started
        self._loading = True
        self._looked_at = 0.0
        self._config = config
        self._process = psutil.Process(pid)
        self._cpu = CpuTimes(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="meter")

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
        if snapshot and snapshot.moment and snapshot.moment not in self.moments[-1:]:
            self.moments.append(snapshot.moment)

    def _take(self, at: float) -> LoadSample:
        gpus = list_gpus()
        self.devices = [gpu.device for gpu in gpus]
        children = self._process.children(recursive=True)
        self.cpu_seconds, _ = self._cpu.read()
        return LoadSample(
            at,
            [gpu.utilisation for gpu in gpus],
            [gpu.used_bytes for gpu in gpus],
            anonymous_bytes(self._process),
            sum(map(anonymous_bytes, children)),
            measure_shared(process.pid for process in (self._process, *children)),
        )


def anonymous_bytes(process: psutil.Process) -> int:
    """0 for a process that has just ended."""
    try:
        memory = process.memory_info()
    except psutil.NoSuchProcess:
        return 0
    return int(memory.rss - memory.shared)


def measure_shared(pids: Iterable[int]) -> int:
    """Memory of the memfds that these processes have open, each counted once."""
    found: dict[int, int] = {}  # by inode
    for pid in pids:
        for file in glob.iglob(f"/proc/{pid}/fd/*"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if os.readlink(file).startswith("/memfd:"):
                    status = os.stat(file)
                    found[status.st_ino] = 512 * status.st_blocks
    return sum(found.values())


def read_gpu_bytes() -> dict[str, int]:
    """In use on each GPU, by device."""
    return {gpu.device: gpu.used_bytes for gpu in list_gpus()}
