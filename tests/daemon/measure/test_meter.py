"""When the meter's clock starts, and what memory it counts."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from daemon.config.loading import parse
from daemon.measure import meter as module
from daemon.measure.meter import Meter, measure_shared
from daemon.monitoring.snapshot import Snapshot, WorkerState
from tests.daemon_process import Place as FakePlace

READY_AT = (0.0, 1_000_002.5, 1_000_001.5)  # of the three workers, the first of which still loads


def test_the_clock_starts_when_the_first_worker_is_ready_however_late_that_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While many workers start, the GPUs' driver answers slowly, and an answer of the daemon takes two seconds."""
    seen = threading.Event()

    def ask(_: object) -> Snapshot:
        workers = [
            WorkerState(f"w/{number}", "cuda:0", "ready" if at else "loading", 0, "", ready_at=at)
            for number, at in enumerate(READY_AT)
        ]
        seen.set()
        return Snapshot(running=True, pending=1, done=0, failed=0, skipped=0, gone=0, workers=workers)

    monkeypatch.setattr(module, "find_snapshot", ask)
    with Meter(os.getpid(), parse(FakePlace(tmp_path).settings, tmp_path)) as meter:
        assert seen.wait(10)
    assert meter.loaded_at == 1_000_001.5


def test_memory_that_processes_share_counts_once() -> None:
    before, fd = measure_shared([os.getpid()]), os.memfd_create("shared")
    try:
        os.write(fd, bytes(3 << 20))
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[fd]) as child:
            assert measure_shared([os.getpid(), child.pid]) == before + (3 << 20)
            assert measure_shared([child.pid]) == 3 << 20
    finally:
        os.close(fd)
