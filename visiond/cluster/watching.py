"""Watches the driver of a run, which is a process of its own.

If Ray's process on its machine dies, Ray ends the driver with _exit(1): no `finally` runs and nothing is printed, and
status 1 would mean that some images FAILED. Only another process can say what has happened.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

from daemon.system.signals import SHELL_OFFSET
from stages.contract.processes import die_with
from visiond.cluster.running import ClusterLost

PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)
HOW = "When the cluster works again, run the same command with --resume to do the rest."


class DriverEnded(Exception):
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
    held = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)  # until there is a driver that can get them
    watcher, driver = os.getpid(), os.fork()
    if not driver:
        os.close(read)
        die_with(watcher)
        _leave_group()
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return partial(_send_word, write)
    os.close(write)
    passed = _pass_signals(driver)
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    os.waitid(os.P_PID, driver, os.WEXITED | os.WNOWAIT)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)  # soon another process may have the driver's id
    status = os.waitstatus_to_exitcode(os.waitpid(driver, 0)[1])
    # Ray's handler of SIGTERM ends the driver with another status.
    if status == -signal.SIGTERM or (status and signal.SIGTERM in passed):
        raise DriverEnded(SHELL_OFFSET + signal.SIGTERM)
    if _has_word(read):
        raise DriverEnded(status if status >= 0 else SHELL_OFFSET - status)
    # Python's handler of SIGINT was not there yet, or no longer.
    if status == -signal.SIGINT and signal.SIGINT in passed:
        raise DriverEnded(SHELL_OFFSET + signal.SIGINT)
    if status < 0:
        raise ClusterLost(f"The driver was killed by {signal.Signals(-status).name}. {HOW}")
    raise ClusterLost(f"Ray ended on this machine, and that ended the run. {HOW}")


def _leave_group() -> None:
    """So that a Ctrl-C, which a terminal sends to a whole process group, reaches the driver only through the watcher, and
    once. A terminal can then be set to stop the driver when it writes; it must not."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def _pass_signals(driver: int) -> set[int]:
    """From now on send the driver what is sent to this process, whose id is the one that users and supervisors know.
    The set that is returned gets the signals that were passed on."""
    passed = set[int]()

    def pass_on(number: int, _: FrameType | None) -> None:
        passed.add(number)
        os.kill(driver, number)

    def pause(number: int, _: FrameType | None) -> None:
        os.kill(driver, number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # returns when the shell lets this process go on
        signal.signal(number, pause)
        os.kill(driver, signal.SIGCONT)

    for number in PASSED:
        if signal.getsignal(number) != signal.SIG_IGN:  # as in the background of a script
            signal.signal(number, pause if number == signal.SIGTSTP else pass_on)
    return passed


def _send_word(pipe: int) -> None:
    os.write(pipe, b".")
    os.close(pipe)


def _has_word(pipe: int) -> bool:
    try:
        return bool(os.read(pipe, 1))
    except BlockingIOError:  # the driver has ended, and a process that it started has not
        return False
