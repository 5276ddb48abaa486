"""The end of child processes: one that is ending is given time, and the log says what is true."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from daemon.system import children
from daemon.system.children import descendants, end, is_ending
from stages.contract.processes import ROOT, environment, python
from tests.daemon_process import wait_for

# Its main thread has ended and another one has not, so for the kernel the process is ending.
ENDING = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(SECONDS,)).start()
ctypes.CDLL(None).syscall(EXIT, 0)
"""
EXIT = {"x86_64": 60}.get(platform.machine(), 93)  # the system call that ends one thread


def start_ending(seconds: float) -> subprocess.Popen[bytes]:
    code = ENDING.replace("SECONDS", str(seconds)).replace("EXIT", str(EXIT))
    child = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: is_ending(child.pid), "a process that is ending")
    return child


@pytest.fixture
def ending() -> Iterator[subprocess.Popen[bytes]]:
    with start_ending(60.0) as child:
        yield child
        child.kill()


def test_a_process_that_is_ending_is_told_from_one_that_works(ending: subprocess.Popen[bytes]) -> None:
    assert is_ending(ending.pid)
    assert not is_ending(os.getpid())
    assert not is_ending(2**22 + 1), "no such process"
    assert ending.pid in descendants(os.getpid())
    assert os.getpid() not in descendants(ending.pid)


class Slow:
    """A process that no signal ends, and that is gone some seconds after it was killed."""

    def __init__(self, pid: int, seconds: float) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.signals: list[int] = []
        self._seconds = seconds

    def send_signal(self, signum: int) -> None:
        self.signals.append(signum)

    async def wait(self) -> None:
        started = time.monotonic()
        try:
            await anyio.sleep(self._seconds)
            self.returncode = -signal.SIGKILL
        finally:
            self._seconds -= time.monotonic() - started


@pytest.mark.anyio
@pytest.mark.parametrize("is_gone", [True, False])
async def test_only_a_process_that_is_ending_gets_more_time(
    is_gone: bool, ending: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "TERM_SECONDS", 0.05)
    monkeypatch.setattr(children, "KILL_SECONDS", 0.05)
    slow: Any = Slow(ending.pid if is_gone else os.getpid(), 0.5 if is_gone else 60.0)
    await end(slow, 0.05)
    assert slow.signals == [signal.SIGTERM, signal.SIGKILL]
    assert (slow.returncode == -signal.SIGKILL) is is_gone


LEAVING = """
import subprocess, sys, time
from daemon.system.children import leave_within
from tests.daemon.system.test_children import start_ending
child = start_ending(float(sys.argv[1]))
leave_within(4.0, 7)
child.wait()
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("hangs_seconds", "status"), [(0.0, 0), (60.0, 7)])
def test_the_daemon_waits_for_workers_that_are_ending_and_not_for_hanging_threads(
    hangs_seconds: float, status: int
) -> None:
    command = python("-c", LEAVING, "6.0", str(hangs_seconds))
    done = subprocess.run(
        command,
        env=environment({"PYTHONPATH": ROOT}),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert ("a thread hangs" in done.stdout + done.stderr) is bool(status)
