"""No training outlives the recipe that started it, and no two use the same folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon_process import wait_for
from visiond.training.children import InUse, end_children, locked, start_child

# A process that ignores SIGTERM, and another one of its group.
STUBBORN = ["sh", "-c", "trap '' TERM; sleep 600 & echo $! $$; while true; do sleep 600; done"]
# A recipe with one training.
RECIPE = """
import os, sys
from pathlib import Path
from visiond.training.children import *
with locked(Path("work")) as lock, stopped_in_order():
    child = start_child(["sh", "-c", "echo $$; exec sleep 600"], Path("pids"), os.environ, lock)
    try:
        child.wait(600)
    finally:
        end_children([child])
"""


def read_pids(file: Path) -> list[int]:
    wait_for(lambda: file.is_file() and file.read_text().endswith("\n"), "the process's number")
    return [int(pid) for pid in file.read_text().split()]


def lives(pid: int) -> bool:
    """Whether a process is alive; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_training_ends_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("visiond.training.children.GRACE_SECONDS", 0.5)
    with locked(tmp_path) as lock:
        child = start_child(STUBBORN, tmp_path / "pids", os.environ, lock)
        pids = read_pids(tmp_path / "pids")
        end_children([child])
    assert child.returncode == -signal.SIGKILL
    wait_for(lambda: not any(map(lives, pids)), "the end of its group")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_training_ends_with_its_recipe(signum: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", RECIPE], cwd=tmp_path, stderr=subprocess.DEVNULL) as recipe:
        (pid,) = read_pids(tmp_path / "pids")
        recipe.send_signal(signum)
        status = recipe.wait(30)
    assert status != 0
    if signum == signal.SIGKILL:
        wait_for(lambda: not lives(pid), "the training's end")
    assert not lives(pid)


def test_a_workdir_is_in_use_while_a_training_of_it_lives(tmp_path: Path) -> None:
    with locked(tmp_path) as lock:
        child = start_child(["sleep", "600"], tmp_path / "output", os.environ, lock)
    try:
        with pytest.raises(InUse, match="another --workdir"), locked(tmp_path):
            pass
    finally:
        end_children([child])
    with locked(tmp_path):
        pass
