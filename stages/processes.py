"""What every child process of visiond does first."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Be sent a signal when the parent dies, however it dies; exit if it has died before. A program that takes this
    process's place by exec keeps to it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def main() -> None:
    """`python -m stages.processes PARENT PROGRAM …` becomes the program, which is asked to end when the parent is gone."""
    die_with(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
