"""Starts child processes of visiond, binds them to their parent, and locks a folder for one process. Counts the cores that
they may use.

No code is imported from the working directory: it may be an inbox, where anybody can put a file called resource.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import signal
import site
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
CGROUPS = Path("/sys/fs/cgroup")
ROOT = str(Path(__file__).resolve().parents[2])


def python(*arguments: str) -> list[str]:
    """A command that runs this Python. Start it with `environment()`."""
    return [sys.executable, "-P", *arguments]


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a Python child: this process's, changed so that the child finds this package from any directory,
    and that the child and the processes that it starts import no code from the working directory."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    entries = [entry for entry in entries if os.path.isabs(entry)]  # an empty one means the working directory
    if ROOT not in site.getsitepackages():
        entries.insert(0, ROOT)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries), "PYTHONSAFEPATH": "1", **(changes or {})}


def die_with(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send a signal to this process when its parent dies; exit if it is dead already.

    For the kernel the parent is the thread that started this process. The setting survives exec.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def read_stat(pid: int) -> list[bytes]:
    """What proc(5) has of a process in `stat`, from its third field on, the state; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def describe_end(status: int | None, killed: str = "killed by", ended: str = "exited with status") -> str:
    """How a child ended, by its exit status: "killed by SIGKILL" or "exited with status 1"."""
    if status is not None and status < 0:
        return f"{killed} {signal.Signals(-status).name}"
    return f"{ended} {status}"


@contextlib.contextmanager
def importing(*, freeze: bool = True) -> Iterator[None]:
    """Import modules without garbage collection, which would take a fifth of the time: what a module makes stays.

    freeze: later collections skip these objects too. Use it with torch's libraries only in a process that ends by
    os._exit, because some of them report frozen objects as leaks when the interpreter ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def locked_folder(folder: str | Path) -> Iterator[int]:
    """Hold the folder's lock. Yields the lock's descriptor: a child that inherits it keeps the lock.

    Raises OSError: BlockingIOError if another process has the lock, NotADirectoryError for a link.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield fd
    finally:
        os.close(fd)


def count_cores() -> int:
    """The cores that this process may use: by its affinity, and by the quota of CPU time of its container. At least 1."""
    return max(1, min([len(os.sched_getaffinity(0)), *measure_quotas(CGROUPS)]))


def measure_quotas(root: Path) -> list[int]:
    """In cores, each quota of CPU time that holds for this process by its cgroups, of version 2 and of version 1. Rounded up:
    with 1.5 cores a second process still gains something."""
    quotas = [_read_quota(folder, "cpu.max") for folder in with_parents(root, own_cgroup())]
    for top in (root / "cpu", root / "cpu,cpuacct"):
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quotas += [_read_quota(folder, *files) for folder in with_parents(top, own_cgroup("cpu"))]
    return [quota for quota in quotas if quota > 0]


def _read_quota(folder: Path, *names: str) -> int:
    """In cores; 0 or less: none."""
    try:
        quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
        return -(-quota // period)
    except (OSError, ValueError, ZeroDivisionError):  # "max"; the root has no quota
        return 0


def own_cgroup(controller: str = "") -> str:
    """The cgroup of this process, below the root: of version 2, or in the hierarchy of this controller of version 1. Empty
    if there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    groups = (line.split(":", 2)[1:] for line in lines)  # "4:cpu,cpuacct:/docker/…"
    return next((path for names, path in groups if controller in names.split(",")), "")


def with_parents(root: Path, group: str) -> list[Path]:
    """The folders of a cgroup and of all around it. In a container the path may be that of the host: then only the root is
    there, which is the container's."""
    own = root / group.strip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]


def main() -> None:
    """`python -m stages.contract.processes PARENT PROGRAM …` runs the program, which gets SIGTERM when the parent dies."""
    die_with(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
