"""Workers that share a GPU by MPS. NVIDIA's control program is a script here, and what tries it out says what a test wants."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import pytest
import structlog

from daemon import layout, mps
from daemon.config import parse
from daemon.gpus import Gpu
from daemon.mps import PIPES, Server, is_installed
from daemon.service import run_service
from tests.daemon_process import Place, wait_for
from tests.faults.test_workers import drop_marked, failed_as, open_place

pytestmark = pytest.mark.anyio

REAL_PYTHON = sys.executable
CONTROL = """#!/bin/sh
echo $$ "$CUDA_VISIBLE_DEVICES" > "$CUDA_MPS_PIPE_DIRECTORY/pid"
exec sleep 600
"""
PYTHON = """#!/bin/sh
[ "$3" = try ] || exec {python} "$@"
until [ -s "$CUDA_MPS_PIPE_DIRECTORY/pid" ]; do sleep 0.01; done
exit {status}
"""
PARENT = """
import os, signal, sys, anyio
from daemon.mps import PIPES, Server

sys.executable = sys.argv[1]

async def main():
    print((await Server("GPU-1").share())[PIPES], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control program is installed, and works. The log goes to where a test reads it."""
    structlog.reset_defaults()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write_program(tmp_path / mps.CONTROL, CONTROL)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPES, raising=False)
    python = write_program(tmp_path / "python", PYTHON.format(python=shlex.quote(REAL_PYTHON), status=0))
    monkeypatch.setattr(sys, "executable", str(python))
    return python


def control_of(shared: dict[str, str]) -> int:
    pid, gpu = Path(shared[PIPES], "pid").read_text().split()
    assert gpu == "GPU-1"
    return int(pid)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and b"Z" not in Path(f"/proc/{pid}/stat").read_bytes().split(b")")[1][:3]


async def test_all_that_share_a_gpu_have_one_server_until_it_is_stopped(trial: Path) -> None:
    server = Server("GPU-1")
    shared = await server.share()
    assert await server.share() is shared
    control = control_of(shared)
    assert is_alive(control)
    await server.stop()
    assert not is_alive(control)
    assert not await anyio.Path(shared[PIPES]).exists()
    assert await server.share() == {}


async def test_where_it_does_not_work_workers_take_turns_and_it_is_tried_once(
    trial: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_program(trial, PYTHON.format(python=shlex.quote(REAL_PYTHON), status=3))
    server = Server("GPU-1")
    assert [await server.share() for _ in range(2)] == [{}, {}]
    assert "".join(capfd.readouterr()).count("MPS does not work here") == 1
    assert not list(trial.parent.glob("visiond-mps-*"))


def test_an_administrators_own_server_is_left_to_cuda(trial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed()
    monkeypatch.setenv(PIPES, "/run/mps")
    assert not is_installed()


def test_it_is_not_looked_for_in_vain(trial: Path) -> None:
    trial.with_name(mps.CONTROL).unlink()
    assert not is_installed()


def test_a_server_does_not_outlive_a_daemon_that_is_killed(trial: Path) -> None:
    told = subprocess.run([trial, "-c", PARENT, trial], capture_output=True, text=True, check=False)
    assert told.returncode == -signal.SIGKILL
    folder = Path(told.stdout.split()[-1])
    control = control_of({PIPES: str(folder)})
    wait_for(lambda: not is_alive(control), "its end")
    shutil.rmtree(folder)


@pytest.mark.parametrize("end", ["segfault", "lost"])
async def test_one_that_is_lost_takes_its_fellows_along_once_and_only_its_own_image_is_blamed(
    end: str, trial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layout, "list_gpus", lambda: [Gpu(0, "GPU-1", "", 1 << 36, 1 << 36, 0, "9.0", None, ())])
    place: Place = open_place(tmp_path, {"POISON": end}, devices=["cuda:0"], workers_per_device=2)
    poison = drop_marked(place, "POISON", 1)
    place.drop_many(range(40))
    with anyio.fail_after(60):
        await run_service(parse(place.settings, tmp_path), once=True)
    told = "".join(capfd.readouterr())
    assert told.count("take turns on the GPU from here on") == told.count("with which it shared its GPU, was lost") == 1
    assert failed_as(place.assert_kept(DONE=40, FAILED=1), "poison") == poison
