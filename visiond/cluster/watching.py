"""Watches the driver of a run, which is a process of its own.

If Ray's process on its machine dies, Ray ends the driver with _exit(1): no `finally` runs and nothing is printed, and
status 1 would mean that some images FAILED. Only another process can say what has happened.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from daemon.system.signals import SHELL_OFFSET
from stages.processes import die_with
from visiond.cluster.running import ClusterLost

HOW = "When the cluster works again, run the same command with --resume to do the rest."


class Ended(Exception):
    """The driver has ended by itself, with this status. Raised in the process that watches it."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def become_driver() -> Callable[[], None]:
    """Fork. The child is the driver: there this returns a function, which the driver calls when it ends by itself, for
    whatever reason. In the parent this does not return: it waits for the driver, and raises Ended or ClusterLost."""
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    os.set_blocking(read, False)
    watcher, driver = os.getpid(), os.fork()
    if not driver:
        os.close(read)
        die_with(watcher)
        return lambda: os.close(write) if os.write(write, b".") else None
    os.close(write)

    def pass_on(number: int, _: FrameType | None) -> None:
        os.kill(driver, number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver gets a Ctrl-C too
    signal.signal(signal.SIGTERM, pass_on)
    status = os.waitstatus_to_exitcode(os.waitpid(driver, 0)[1])
    if _has_word(read):
        raise Ended(status if status >= 0 else SHELL_OFFSET - status)
    if status == -signal.SIGTERM:
        raise Ended(SHELL_OFFSET + signal.SIGTERM)
    if status < 0:
        raise ClusterLost(f"The driver was killed by {signal.Signals(-status).name}. {HOW}")
    raise ClusterLost(f"Ray ended on this machine, and that ended the run. {HOW}")


def _has_word(pipe: int) -> bool:
    try:
        return bool(os.read(pipe, 1))
    except BlockingIOError:  # the driver has ended, and a process that it started has not
        return False
