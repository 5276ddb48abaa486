"""How child processes of visiond are started, what each does first, and the lock by which a folder is one process's.

No code comes from the working directory: it may be an inbox, where a file called resource.py is anybody's.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import site
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
ROOT = str(Path(__file__).resolve().parents[1])


def python(*arguments: str) -> list[str]:
    """A command that runs this Python, to be given `environment()`."""
    return [sys.executable, "-P", *arguments]


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a Python child: it finds this package wherever it is run from, and neither the child nor
    what the child starts takes code from the working directory."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    entries = [entry for entry in entries if os.path.isabs(entry)]  # an empty one means the working directory
    if ROOT not in site.getsitepackages():
        entries.insert(0, ROOT)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries), "PYTHONSAFEPATH": "1", **(changes or {})}


def die_with(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Be sent a signal when the parent dies, however it dies; exit if it has died before. To the kernel the parent is the
    thread that has started this process. A program that takes this process's place by exec keeps to it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


@contextlib.contextmanager
def locked_folder(folder: str | Path) -> Iterator[int]:
    """No other process has the folder's lock meanwhile. Yields the lock's descriptor: a child that has it too keeps the lock.
    Raises OSError, BlockingIOError where another process has it; a link is no folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield fd
    finally:
        os.close(fd)


def main() -> None:
    """`python -m stages.processes PARENT PROGRAM …` becomes the program, which is asked to end when the parent is gone."""
    die_with(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
