"""Measures the machine while a daemon works: load of GPUs, memory, and when the models are loaded."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import msgspec
import psutil

from daemon.config.loading import Config
from daemon.control import find_snapshot
from daemon.system.gpus import list_gpus

INTERVAL_SECONDS = 0.1


class Sample(msgspec.Struct, frozen=True):
    """Figures at one moment. Lists have an entry for each GPU."""

    at: float  # seconds since the daemon was started
    gpu_utilisation: list[float | None]  # 0..1
    gpu_used_bytes: list[int]
    daemon_bytes: int  # anonymous memory, without the slab and mapped files
    workers_bytes: int  # all the daemon's children together


class Meter:
    """Within its context, a thread takes samples of a daemon's process."""

    def __init__(self, pid: int, config: Config) -> None:
        self.samples: list[Sample] = []
        self.started = time.time()
        # Unix seconds: when the first worker was ready. Until that is known, the last time that none was.
        self.loaded_at = self.started
        self._config = config
        self._process = psutil.Process(pid)
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
        loading = True
        while not self._ended.wait(INTERVAL_SECONDS):
            now = time.time()
            if loading:
                snapshot = find_snapshot(self._config)
                if snapshot and not snapshot.loading:
                    loading = False
                    ready_at = [worker.ready_at for worker in snapshot.workers if worker.ready_at]
                    self.loaded_at = min(ready_at, default=self.loaded_at)
                else:
                    self.loaded_at = now
            try:
                self.samples.append(self._take(now - self.started))
            except psutil.NoSuchProcess:
                return

    def _take(self, at: float) -> Sample:
        gpus = list_gpus()
        return Sample(
            at,
            [gpu.utilisation for gpu in gpus],
            [gpu.used_bytes for gpu in gpus],
            anonymous_bytes(self._process),
            sum(map(anonymous_bytes, self._process.children(recursive=True))),
        )


def anonymous_bytes(process: psutil.Process) -> int:
    """0 for a process that has just ended."""
    try:
        memory = process.memory_info()
    except psutil.NoSuchProcess:
        return 0
    return int(memory.rss - memory.shared)
