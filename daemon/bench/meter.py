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
    """Within its context, one thread takes samples of a daemon's process, and another one waits for its models:
    while many workers start, the GPUs' driver answers slowly, and a sample can take two seconds."""

    def __init__(self, pid: int, config: Config) -> None:
        self.samples: list[Sample] = []
        self.started = time.time()
        # Unix seconds: the last time the daemon was asked and no worker had loaded its models
        self.loaded_at = self.started
        self._config = config
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, name="meter"),
            threading.Thread(target=self._wait_for_models, name="meter-models"),
        ]

    def __enter__(self) -> Meter:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _wait_for_models(self) -> None:
        while not self._ended.wait(INTERVAL_SECONDS):
            now = time.time()
            snapshot = find_snapshot(self._config)
            if snapshot and not snapshot.loading:
                return
            self.loaded_at = now

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_SECONDS):
            try:
                self.samples.append(self._take(time.time() - self.started))
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
