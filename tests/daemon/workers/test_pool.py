"""The pool with other programs as workers: they cannot start, or send nonsense."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from daemon.config.pipeline import PipelineSection
from daemon.core.errors import WorkerLost
from daemon.core.messages import Farewell, Item, Looked, Ready, Reply, Setup, frame
from daemon.core.slab import Slab
from daemon.monitoring.metrics import Metrics
from daemon.workers import pool
from daemon.workers.pool import Pool
from daemon.workers.slot import QUICK_DEATHS, Slot
from stages.contract.base import Limits
from tests.daemon_process import PATIENCE, until

pytestmark = pytest.mark.anyio

BABBLER = """#!{python}
import socket, sys
line = socket.socket(fileno=int(sys.argv[4]))
line.recv(1 << 20)
line.sendall((1 << 31).to_bytes(4, "little"))
line.recv(1)
"""


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Slot]:
    """The slot of a pool, which starts the program in sys.executable."""
    async with working() as pool:
        yield pool.slots[0]


@contextlib.asynccontextmanager
async def working(ended: anyio.Event | None = None) -> AsyncIterator[Pool]:
    """ended: set when the pool ends."""
    setup = Setup("w/0", "cpu", [], slab_bytes=0, threads=1, decoders=1, limits=Limits(), cascade=None)
    slot = Slot(setup, "cpu", {})
    with contextlib.closing(Slab(1 << 20)) as slab:
        async with anyio.create_task_group() as tasks:
            settings = PipelineSection(load_timeout_seconds=10 * PATIENCE, batch_timeout_seconds=PATIENCE)
            workers = Pool("w", [slot], slab.fd, settings, Metrics())

            async def work() -> None:
                await workers.run()
                if ended:
                    ended.set()

            tasks.start_soon(work)
            yield workers
            tasks.cancel_scope.cancel()


async def test_a_worker_that_cannot_be_started_is_tried_again_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool, "BACKOFF_SECONDS", 0.001)
    python = sys.executable
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    failures = ""

    def many() -> bool:
        nonlocal failures
        failures += capsys.readouterr().out
        return failures.count("worker cannot be started") > 2 * QUICK_DEATHS

    async with running() as slot:
        await until(many)
        assert slot.last_cause == "it cannot be started: No such file or directory"
        monkeypatch.setattr(sys, "executable", python)
        await until(lambda: slot.state == "ready")


async def test_a_message_that_is_too_long_ends_the_worker_and_uses_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    babbler = tmp_path / "babbler"
    babbler.write_text(BABBLER.format(python=sys.executable))
    babbler.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(babbler))
    async with running() as slot:
        await until(lambda: slot.last_cause == f"it sent an invalid message: a message of {1 << 31} bytes")


async def test_a_worker_that_is_not_heard_is_silent_until_it_is_heard_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as place:
        await until(lambda: place.describe().state == "ready")
        assert place.worker
        os.kill(place.worker.process.pid, signal.SIGSTOP)
        monkeypatch.setattr("daemon.workers.slot.SILENCE_SECONDS", 1.5)
        await until(lambda: place.describe().state == "silent")
        os.kill(place.worker.process.pid, signal.SIGCONT)
        await until(lambda: place.describe().state == "ready")


async def test_a_slot_is_not_closed_though_others_kill_its_worker_again_and_again_while_there_is_no_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("daemon.workers.worker.OLD_SECONDS", 0.0)
    async with running() as slot:
        for _ in range(QUICK_DEATHS + 1):
            await until(lambda: slot.state == "ready")
            worker = slot.worker
            assert worker
            os.kill(worker.process.pid, signal.SIGKILL)
            await until(lambda worker=worker: slot.worker is not worker)
        assert slot.last_cause == "killed by SIGKILL"
        assert not slot.quick_deaths


LEAVER = """#!{python}
import socket, sys
line = socket.socket(fileno=int(sys.argv[4]))
line.recv(1 << 20)
line.sendall(bytes.fromhex("{ready}"))
line.recv(1 << 20)
line.sendall(bytes.fromhex("{end}"))
"""


async def test_the_images_of_a_worker_that_leaves_for_wrong_answers_are_no_suspects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaver, ready = tmp_path / "leaver", frame(Ready({})).hex()
    end = (frame(Looked({"clip": "zeros"})) + frame(Farewell("its answers are wrong", curable=True))).hex()
    leaver.write_text(LEAVER.format(python=sys.executable, ready=ready, end=end))
    leaver.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(leaver))
    async with working() as lending:
        worker = await lending.reserve()
        with pytest.raises(WorkerLost, match="its answers are wrong") as loss:
            await lending.run_batch(worker, [Item(0, 1, {})])
        assert not loss.value.began


SLEEPER = "#!/bin/sh\nexec sleep 600\n"


@pytest.mark.parametrize("state", ["new", "loading", "waiting"])
async def test_a_pool_that_is_stopped_waits_for_no_worker_that_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 3\n" if state == "waiting" else SLEEPER)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(pool, "BACKOFF_SECONDS", 600.0)
    ended = anyio.Event()
    async with working(ended) as workers:
        if state == "loading":
            await until(lambda: workers.slots[0].worker is not None)
        elif state == "waiting":
            await until(lambda: workers.slots[0].state == "waiting")
        workers.stop()
        with anyio.fail_after(PATIENCE):
            await ended.wait()


class FakeWorker:
    """Notes how long each batch may take, and has a clock of its own."""

    def __init__(self) -> None:
        self.seconds, self.limits, self.now = 0.0, list[float](), 0.0

    def monotonic(self) -> float:
        return self.now

    async def run(self, items: list[Item], limit: float) -> Reply:
        self.limits.append(limit)
        self.now += self.seconds
        return Reply(0, [], [])


async def test_a_batch_may_take_longer_on_a_machine_that_is_slow_and_no_longer_when_it_is_fast_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = FakeWorker()
    monkeypatch.setattr(pool, "time", worker)
    workers = Pool("w", [], 0, PipelineSection(batch_timeout_seconds=0.1), Metrics())
    many, few = [Item(0, 1, {})] * 8, [Item(0, 1, {})]
    for seconds, items in ((0.05, many), *([(0.0, few)] * 9), *([(0.0, many)] * 9)):
        worker.seconds = seconds
        await workers.run_batch(cast(Any, worker), items)
    first, *after_few = worker.limits[:11]
    assert first == worker.limits[-1] == 0.1
    assert min(after_few) > 0.15, "small batches say nothing about large ones"
