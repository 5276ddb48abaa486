from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from daemon.layout.layout import LEAST_CPU_THREADS
from daemon.workers import child
from stages.contract.base import DeviceLost
from stages.contract.processes import count_cores
from tests.daemon_process import Daemon, Place

PROGRAM = """
from resource import RUSAGE_SELF, getrusage
from daemon.workers.child import keep_memory

def use():
    return [b"x" * (4 << 20 | block) for block in range(16)]

keep_memory()
use()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(100):
    use()
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 16 * (4 << 20) // 4096  # that it takes once


def test_memory_that_one_batch_frees_serves_the_next_without_the_kernel() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < PAGES


def test_after_an_error_that_may_pass_the_next_worker_may_load() -> None:
    broken = RuntimeError("the checkpoint cannot be opened")
    broken.__cause__ = OSError(errno.EIO, os.strerror(errno.EIO))
    for error in (DeviceLost("gone"), broken, OSError(errno.EMFILE, os.strerror(errno.EMFILE))):
        assert child.is_curable(error)
    for error in (RuntimeError("a bug"), FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))):
        assert not child.is_curable(error)


def test_a_worker_of_a_group_reports_the_memory_of_all_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", [30, 4].__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", [50, 6].__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_allocated", [20, 1].__getitem__)
    assert child._device_memory() == (34, 56, 21)


def test_a_worker_beats_on_while_one_of_its_threads_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.delitem(sys.modules, "stages.registry.fake", raising=False)
    assert child._device_memory() == (0, 0, 0)


LIMIT = """
import cv2
from daemon.workers.child import limit_threads
cv2.setNumThreads(7)
limit_threads()
print(cv2.getNumThreads())
"""


def test_opencv_starts_as_many_threads_as_the_other_libraries_and_not_one_for_each_core() -> None:
    """It ignores OMP_NUM_THREADS."""
    ended = subprocess.run(
        [sys.executable, "-c", LIMIT],
        env=os.environ | {"OMP_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ended.stdout) == 3


FAKE_OPENCV = """
import sys, types
if "daemon.workers.child" in sys.orig_argv:
    opencv = sys.modules["cv2"] = types.ModuleType("cv2")
    opencv.setNumThreads = open(FILE, "a", 1).write
    opencv.setNumThreads = lambda number, write=opencv.setNumThreads: write(f"{number}\\n")
"""


def test_a_worker_limits_opencv_before_its_first_batch(tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FAKE_OPENCV.replace("FILE", repr(str(noted))))
    with Daemon(Place(tmp_path), environment={"PYTHONPATH": str(tmp_path / "site")}):
        assert int(noted.read_text()) == max(LEAST_CPU_THREADS, count_cores())
