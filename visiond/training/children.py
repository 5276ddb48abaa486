"""Runs trainings as child processes that end when their parent ends, in whatever way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from stages.contract.processes import locked_folder, python

# Between SIGTERM and SIGKILL; in this time torchrun ends its ranks, which have separate process groups.
GRACE_SECONDS = 10.0

Child = subprocess.Popen[bytes]


class InUse(Exception):
    """Another process uses the folder."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock the folder. Yields the lock's descriptor: as long as a child has it, the folder is locked,
    even if this process is killed. Raises InUse."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(locked_folder(folder.resolve()))
        except BlockingIOError:
            raise InUse(f"another training uses {folder}; stop it, or set another --workdir.") from None
        yield lock


def start_child(command: Sequence[str], output: Path, environment: Mapping[str, str], lock: int) -> Child:
    """Start a child in a separate process group. Ctrl-C does not reach it: call `end_children`.
    lock: to be inherited."""
    bound = python("-m", "stages.contract.processes", str(os.getpid()), *command)
    with output.open("wb") as file:
        return subprocess.Popen(
            bound,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            pass_fds=(lock,),
            process_group=0,
        )


def end_children(children: Collection[Child]) -> None:
    """End children and their process groups: with SIGTERM, then with SIGKILL."""
    until = time.monotonic() + GRACE_SECONDS
    for child in children:
        _signal_group(child, signal.SIGTERM)
    for child in children:
        _wait(child, until - time.monotonic())
        _signal_group(child, signal.SIGKILL)
        _wait(child, GRACE_SECONDS)


def _signal_group(child: Child, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signum)


def _wait(child: Child, seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(max(0, seconds))


@contextlib.contextmanager
def stopped_in_order() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that children are ended before this process."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(signum: int, _: object) -> NoReturn:
    sys.exit(128 + signum)
