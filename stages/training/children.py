"""Trainings as processes that end with the one that has started them, however that ends."""

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

from stages.processes import locked_folder, python

GRACE_SECONDS = 10.0  # between asking and killing; torchrun ends its ranks meanwhile, which have groups of their own

Child = subprocess.Popen[bytes]


class InUse(Exception):
    """Another process works in the folder."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """No other process has the folder meanwhile. Yields the lock's descriptor: while a child has it too, the folder is not
    free, though this process be killed. Raises InUse."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(locked_folder(folder.resolve()))
        except BlockingIOError:
            raise InUse(f"another training works in {folder}; stop it, or name another --workdir.") from None
        yield lock


def start_child(command: Sequence[str], output: Path, environment: Mapping[str, str], lock: int) -> Child:
    """In a group of its own, which Ctrl-C does not reach: `end_children` has to. lock: a descriptor to keep open."""
    bound = python("-m", "stages.processes", str(os.getpid()), *command)
    with output.open("wb") as file:
        return subprocess.Popen(
            bound, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, pass_fds=(lock,), process_group=0
        )


def end_children(children: Collection[Child]) -> None:
    """With all that is left of their groups: asked first, then made to."""
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
    """SIGTERM is a SystemExit meanwhile, so that children are ended before this process is gone."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(signum: int, _: object) -> NoReturn:
    sys.exit(128 + signum)
