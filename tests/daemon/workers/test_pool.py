"""The pool with other programs as workers: they cannot start, or send nonsense."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from daemon.config.sections import PipelineSection
from daemon.messages import Setup
from daemon.monitoring.metrics import Metrics
from daemon.workers import pool
from daemon.workers.pool import Pool
from daemon.workers.seat import Seat
from daemon.workers.slab import Slab
from stages.base import Limits
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
async def running() -> AsyncIterator[Seat]:
    """A pool of one seat, which starts the program in sys.executable."""
    setup = Setup("w/0", "cpu", [], slab_bytes=0, threads=1, decoders=1, limits=Limits(), cascade=None)
    seat = Seat(setup, "cpu", {})
    with contextlib.closing(Slab(1 << 20)) as slab:
        async with anyio.create_task_group() as tasks:
            settings = PipelineSection(load_timeout_seconds=PATIENCE, batch_timeout_seconds=PATIENCE)
            tasks.start_soon(Pool("w", [seat], slab.fd, settings, Metrics()).run)
            yield seat
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
        return failures.count("worker cannot be started") > 2 * pool.QUICK_DEATHS

    async with running() as seat:
        await until(many)
        assert seat.last_cause == "it cannot be started: No such file or directory"
        monkeypatch.setattr(sys, "executable", python)
        await until(lambda: seat.state == "ready")


async def test_a_message_that_is_too_long_ends_the_worker_and_uses_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    babbler = tmp_path / "babbler"
    babbler.write_text(BABBLER.format(python=sys.executable))
    babbler.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(babbler))
    async with running() as seat:
        await until(lambda: seat.last_cause == f"it sent an invalid message: a message of {1 << 31} bytes")
