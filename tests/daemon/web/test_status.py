"""What the status says about the time to go."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.jobs import Admitted, JobStatus
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import WorkerState
from daemon.web.status import Status
from tests.makers import done, make_job

READY, LOADING = (WorkerState("w", "cpu", state, 0, "") for state in ("ready", "loading"))


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        nobody: Any = None
        pipeline: Any = SimpleNamespace(
            looks=[],
            outbox=SimpleNamespace(deliveries=[]),
            states=list,
            blocked=list,
        )
        self.metrics = Metrics()
        self.status = Status(pipeline, nobody, self.metrics)

    def look(self, worker: WorkerState = READY) -> float | None:
        self.status._rate()
        return self.status._estimate(self.metrics.counts.of(JobStatus.PENDING), [worker])

    def admit(self, images: int) -> None:
        self.metrics.counts.admitted(Admitted(pending=images, skipped=0, replaced=0))


def test_an_idle_time_does_not_count_for_the_time_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for _ in range(10):
        assert clock.look() is None
        clock.now += 5
    clock.admit(11)
    clock.now += 2
    clock.metrics.counts.finished([done(make_job())])
    assert clock.look() == 20.0


def test_the_loading_of_models_does_not_count_for_the_time_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.admit(11)
    for _ in range(10):
        assert clock.look(LOADING) is None
        clock.now += 2
    assert clock.look() is None, "nothing is finished yet"
    clock.metrics.counts.finished([done(make_job())])
    assert clock.look() == 20.0
