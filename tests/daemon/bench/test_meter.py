"""What the meter says about a daemon while the machine answers slowly."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from daemon.bench import meter as module
from daemon.bench.meter import Meter
from daemon.config.loading import parse
from daemon.monitoring.snapshot import Snapshot, WorkerState
from daemon.system.gpus import Gpu
from tests.daemon_process import Place as FakePlace


def test_a_slow_sample_does_not_move_the_moment_at_which_models_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["loading", "loading", "ready"])
    loaded, sampled = threading.Event(), threading.Event()

    def ask(_: object) -> Snapshot:
        state = next(states)
        if state == "ready":
            loaded.set()
        workers = [WorkerState("w", "cuda:0", state, 0, "")]
        return Snapshot(running=True, pending=1, done=0, failed=0, skipped=0, gone=0, workers=workers)

    def list_slowly() -> list[Gpu]:
        assert loaded.wait(10), "nobody asked the daemon during the sample"
        sampled.set()
        return []

    monkeypatch.setattr(module, "find_snapshot", ask)
    monkeypatch.setattr(module, "list_gpus", list_slowly)
    with Meter(os.getpid(), parse(FakePlace(tmp_path).settings, tmp_path)) as meter:
        assert sampled.wait(20)
    assert meter.loaded_at > meter.started
    assert next(states, None) is None
