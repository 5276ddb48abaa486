"""What the status says about the time to go."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.core.jobs import Admitted, JobStatus
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import WorkerState
from daemon.server.status import Status
from tests.makers import done, make_job

READY, LOADING = (WorkerState("w", "cpu", state, 0, "") for state in ("ready", "loading"))
OTHER, NEXT = WorkerState("v", "cpu", "ready", 0, ""), WorkerState("w", "cpu", "ready", 0, "", ready_at=9.0)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.metrics = Metrics()
        pipeline: Any = SimpleNamespace(
            metrics=self.metrics,
            looks=[],
            outbox=SimpleNamespace(deliveries=[]),
            states=list,
            blocked=list,
        )
        self.status = Status(pipeline)

    def look(self, *workers: WorkerState) -> float | None:
        """The time to go."""
        rate = self.status._rate(list(workers or (READY,)))
        return self.metrics.counts.of(JobStatus.PENDING) / rate if rate else None

    def work(self, seconds: int, a_second: int, *workers: WorkerState) -> list[float | None]:
        """The times to go, once a second."""
        found = []
        for _ in range(seconds):
            self.now += 1
            self.metrics.finished([done(make_job()) for _ in range(a_second)])
            found.append(self.look(*workers))
        return found

    def admit(self, images: int) -> None:
        self.metrics.counts.admitted(Admitted(pending=images, skipped=0, replaced=0))


def test_an_idle_time_does_not_count_for_the_time_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for _ in range(10):
        assert clock.look() is None
        clock.now += 5
    clock.admit(11)
    clock.now += 2
    clock.metrics.finished([done(make_job())])
    assert clock.look() == 20.0


def test_the_loading_of_models_does_not_count_for_the_time_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.admit(11)
    for _ in range(10):
        assert clock.look(LOADING) is None
        clock.now += 2
    assert clock.look() is None, "nothing is finished yet"
    clock.now += 2
    clock.metrics.finished([done(make_job())])
    assert clock.look() == 20.0


def test_the_time_in_which_no_worker_is_ready_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.admit(1000)
    assert clock.look() is None
    assert clock.work(10, 10)[-1] == 90.0
    assert set(clock.work(10, 0, LOADING)) == {None}
    assert clock.look(NEXT) == 90.0, "its successor is taken to be as fast"
    assert [clock.work(2, 20, NEXT)[-1], clock.work(2, 20, NEXT)[-1]] == [86.0, 41.0], "it is twice as fast"


def test_the_pace_is_that_of_the_workers_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.admit(1000)
    clock.look(READY, OTHER)
    assert clock.work(20, 20, READY, OTHER)[-1] == 30.0
    assert clock.work(10, 10, OTHER) == [59.0 - n for n in range(10)]
    assert clock.work(5, 20, NEXT, OTHER) == [24.0 - n for n in range(5)]


def test_the_pace_is_that_of_the_last_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.admit(10_000)
    clock.look()
    clock.work(40, 1)
    assert clock.work(30, 10)[-1] == (10_000 - 40 - 300) / 10


def test_an_idle_time_before_a_retry_does_not_count_either(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.work(20, 0)
    clock.metrics.counts.begin({JobStatus.FAILED: 11})
    clock.metrics.counts.put_back(JobStatus.FAILED, 11)
    assert clock.work(2, 1)[-1] == 9.0
