"""Starts child processes of the daemon that talk to it over a socket, and ends them; and ends this process when they
are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

import anyio
import anyio.abc
import psutil
import structlog

from daemon.system import lines
from daemon.system.printed import Printed
from stages.contract import processes

log = structlog.get_logger()

TERM_SECONDS = 2.0  # between SIGTERM and SIGKILL
KILL_SECONDS = 2.0  # for a killed process to end, unless it frees much
EXIT_SECONDS = 20.0  # for a process that is ending: the driver may take long to free what it had on a GPU
END_SECONDS = TERM_SECONDS + KILL_SECONDS + EXIT_SECONDS  # that `end` takes at most
EXIT_POLL_SECONDS = 0.2  # to see whether workers that are ending are gone
EXITING = 0x4  # in a process's flags: PF_EXITING in linux/sched.h

P = TypeVar("P", bound=Printed)


class Parent(threading.Thread):
    """A thread that may start children: it ends only when they have ended, or with its process."""


class Child(NamedTuple, Generic[P]):
    process: anyio.abc.Process
    connection: socket.socket
    printed: P


async def start(module: str, printed: P, *fds: int, environment: Mapping[str, str] | None = None) -> Child[P]:
    """Start `python -m module SOCKET_FD FDS … PARENT_PID`, which is killed when this process ends.
    printed: reads what the child prints. Raises OSError."""
    # The kernel ends the child with the thread that started it (die_with), not with the process.
    thread = threading.current_thread()
    assert thread is threading.main_thread() or isinstance(thread, Parent)
    ours, theirs = socket.socketpair()
    arguments = [str(number) for number in (theirs.fileno(), *fds, os.getpid())]
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        output = await printed.open()
        undo.callback(printed.close)
        try:
            process = await anyio.open_process(
                processes.python("-m", module, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=processes.environment(environment),
                pass_fds=(theirs.fileno(), *fds),
            )
        finally:
            os.close(output)
        undo.pop_all()
    ours.setblocking(False)
    return Child(process, ours, printed)


def kill(process: anyio.abc.Process, signum: signal.Signals = signal.SIGKILL) -> None:
    """Send it a signal. It may have ended, even where its `returncode` does not show that yet."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signum)


async def end(process: anyio.abc.Process, term_seconds: float = TERM_SECONDS) -> None:
    """SIGTERM, later SIGKILL, and reap. A process that is ending already gets more time. If it is not gone
    afterwards, its returncode is None."""
    with anyio.CancelScope(shield=True):
        for signum, seconds in ((signal.SIGTERM, term_seconds), (signal.SIGKILL, KILL_SECONDS)):
            if process.returncode is None:
                kill(process, signum)
                await _wait(process, seconds)
        if is_ending(process.pid):
            await _wait(process, EXIT_SECONDS)


async def _wait(process: anyio.abc.Process, seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await process.wait()


def is_ending(pid: int) -> bool:
    """Whether a process no longer runs any code, while the kernel is still freeing what it had."""
    if not (fields := processes.read_stat(pid)):
        return False
    state, flags, threads = fields[0], int(fields[6]), int(fields[17])
    is_gone = state == b"Z" and threads <= 1  # nobody has asked for its exit status yet
    return bool(flags & EXITING) and not is_gone


def descendants(pid: int) -> Iterator[int]:
    """The process's children, their children, and so on; none if it has ended.

    Found by the parent of each process on the machine. The list of threads in /proc/PID/task, whose files name the children
    of each, is cut short when a thread ends while it is read.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            yield child.pid


def leave_within(seconds: float, status: int = os.EX_OK, why: str = "") -> None:
    """End the process after this time, even if a thread hangs in a system call, for example on a dead mount.
    Workers that are ending, but not gone yet, get more time."""

    def is_a_worker_ending() -> bool:
        return any(map(is_ending, descendants(os.getpid())))

    def leave() -> None:
        started = last_ending = time.monotonic()
        while (now := time.monotonic()) < last_ending + seconds:
            if now < started + END_SECONDS and is_a_worker_ending():
                last_ending = now
            time.sleep(min(EXIT_POLL_SECONDS, seconds / 4))
        if why:
            log.error(why)
        reason = "a thread hangs in a system call, perhaps on a dead mount"
        if is_a_worker_ending():
            reason = "a worker has not ended, because the GPU's driver is still freeing its memory"
        log.warning(f"{reason}; the daemon exits without waiting for it; nothing is lost")
        lines.drain()
        os._exit(status)

    threading.Thread(target=leave, name="leave", daemon=True).start()
