"""What the threads of the workers wait for, by what the executors say."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.monitoring.metrics import Metrics
from daemon.monitoring.moments import Limits, Load, find_waits
from daemon.monitoring.processes import CpuTimes
from daemon.monitoring.snapshot import BatcherState, ExecutorState, GpuState, WorkerState
from daemon.system.gpus import Gpu


def batcher(name: str = "ocr", queued: int = 0, busy: int = 0, state: str = "ready") -> BatcherState:
    """A segment with one worker of four threads."""
    worker = WorkerState(f"{name}/0", "cpu", state, 0, "", threads=4, busy=busy)
    return BatcherState(name, queued, [worker], batch_size=8)


def executor(*batchers: BatcherState, **more: Any) -> ExecutorState:
    return ExecutorState(batchers=list(batchers), slab_used=0, slab_size=1, progressed_at=0.0, **more)


@pytest.mark.parametrize(
    ("states", "has_files", "occupied", "waiting"),
    [
        ([executor(batcher(busy=1))], False, 0.25, {"input": 0.75}),
        ([executor(batcher(busy=1))], True, 0.25, {"read": 0.75}),
        ([executor(batcher(busy=1), waits_for_room=True)], True, 0.25, {}),
        ([executor(batcher(busy=1, queued=9))], True, 0.25, {"publish": 0.75}),
        ([executor(batcher(), is_backed_up=True)], True, 0.0, {"publish": 1.0}),
        ([executor(batcher(busy=4))], False, 1.0, {"input": 0.0}),
        ([executor(batcher(state="loading"))], False, None, {"input": 0.0}),
        ([executor(batcher(busy=4)), executor(batcher(busy=2))], True, 0.75, {"read": 0.25}),
        ([executor(batcher("a", busy=1, queued=9), batcher("b", busy=4))], True, 1.0, {}),
        ([executor(batcher("a", busy=3), batcher("b", busy=1))], False, 0.75, {"input": 0.25}),
        (
            [executor(batcher("a", busy=1), batcher("b", queued=9))],
            False,
            0.25,
            {"input": 0.75, "publish": 1.0},
        ),
    ],
)
def test_what_free_threads_wait_for(
    states: list[ExecutorState], has_files: bool, occupied: float | None, waiting: dict[str, float]
) -> None:
    assert find_waits(states, has_files=has_files) == (occupied, waiting)


def test_only_the_gpus_of_the_workers_count() -> None:
    worker = WorkerState("ocr/0", "cuda:1+cuda:2", "ready", 0, "", threads=4, busy=4)
    gpus = [GpuState(f"cuda:{n}", "card", 0, 0, busy) for n, busy in enumerate((0.99, 0.4, 0.6, 0.98))]
    limits = Limits()
    load = Load({}, 0, gpus)
    limits.add([executor(BatcherState("ocr", 0, [worker]))], load, ended=0, in_flight=4, has_files=False)
    assert limits.last
    assert limits.last.gpu_busy == pytest.approx(0.5)


@pytest.mark.parametrize("last", [{"state": "loading"}, {"is_paused": True}])
def test_nothing_limits_while_no_worker_is_ready_or_the_daemon_is_paused(last: dict[str, Any]) -> None:
    limits, parts = Limits(), list[str]()
    is_paused = last.pop("is_paused", False)
    for number, state in enumerate([{}, {}, {}, last, {}]):
        limits.add(
            [executor(batcher(busy=4, **state))],
            Load({}, 0, []),
            ended=number + 1,
            in_flight=4,
            has_files=True,
            is_paused=is_paused and number == 3,
        )
        parts.append(limits.limit.part)
    assert parts[2:] == ["workers", "", "workers"]


def test_a_driver_that_fails_does_not_end_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def fail() -> list[Gpu]:
        raise NVMLError("the GPU is lost")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError))  # as after the start
    monkeypatch.setattr("daemon.monitoring.machine.list_gpus", fail)
    assert Limits().measure(Metrics().gpu_states).gpus == []


def test_the_cpu_time_of_a_child_counts_after_its_end_and_by_its_kind() -> None:
    """The last two have a child that runs another program."""
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    within = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    times = CpuTimes(os.getpid())
    before, _ = times.read()
    for program, kind, module in (
        (spin, "decoders", "stages.images.decoder"),
        (within, "workers", "daemon.workers.child"),
        (within, "unpackers", "daemon.unpacking.child"),
    ):
        command = [sys.executable, "-c", program, module]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout
            child.stdout.readline()
            during, decoders = times.read()
            child.communicate(b"\n")
        after, left = times.read()
        assert (decoders, left) == (kind == "decoders", 0)
        assert 0.25 < during[kind] == after[kind] < 1.3
    assert after["daemon"] >= before["daemon"] > 0
