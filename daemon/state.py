"""The daemon's own folder: what lies where, and who may use it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from daemon.errors import AlreadyRunning, ConfigError

LEDGER = "ledger.sqlite"
IDENTITY = "identity"  # says which ledger belongs here
DATABASE = ("-wal", "-shm", "")  # the names of SQLite's files, behind the ledger's
CONTROL = "control.sock"
LOCK = "lock"
DIARY = "upkeep.json"
NAMES = "inboxes.json"
KERNELS = "kernels"  # compiled for the GPU, so that only the first start compiles them
OWN = (IDENTITY, CONTROL, LOCK, DIARY, NAMES, KERNELS)  # beside the ledger
SOCKET_BYTES = 107  # unix(7)
FLOCK = "hhqqi4x"  # struct flock of fcntl(2), on 64 bits


@contextlib.contextmanager
def lock_state(folder: Path) -> Iterator[None]:
    """Hold the folder for this process alone, until the end of the context or of the process.

    Nobody else may look into it, and what this process makes meanwhile is closed to all but its owner and group.

    Raises AlreadyRunning, ConfigError.
    """
    with closed_to_others(), _locked(folder):
        yield


@contextlib.contextmanager
def closed_to_others() -> Iterator[None]:
    """Files and folders that are made meanwhile, by any thread or child, can be read by their owner and group alone. A stricter
    umask stays."""
    before = os.umask(0o077)
    os.umask(before | 0o027)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _shut(folder)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError([f"state.path: {folder} cannot be used: {error.strerror}."]) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken = f"{folder}{_holder_of(fd)}"
            raise AlreadyRunning(f"Another visiond works with {taken}. Stop it, or name another [state] path.") from None
        with contextlib.suppress(OSError):
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which keeps nobody out, but tells whose it is
        yield
    finally:
        os.close(fd)


def _shut(folder: Path) -> None:
    """To all others, whom an older visiond let in. What its group may do is the administrator's business. A folder that holds
    other things too stays open; then only our own files are shut."""
    entries = list(folder.iterdir())
    own = [entry for entry in entries if entry.name.startswith((LEDGER, *OWN, *(f".{name}" for name in OWN)))]
    for path in [folder] if len(own) == len(entries) else own:
        status = path.lstat()
        if status.st_uid == os.geteuid() and status.st_mode & stat.S_IRWXO and not stat.S_ISLNK(status.st_mode):
            path.chmod(stat.S_IMODE(status.st_mode) & ~stat.S_IRWXO)


def _holder_of(fd: int) -> str:
    """The process that holds the lock now, as the kernel knows it; empty where it cannot tell, as of another container."""
    question = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with contextlib.suppress(OSError):
        pid = struct.unpack(FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, question))[-1]
        return f", as process {pid}" if pid > 0 else ""
    return ""


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """A name for a socket's file that fits into an address, whose end is at SOCKET_BYTES: for a longer path by its folder's
    descriptor. Raises OSError."""
    if len(os.fsencode(path)) <= SOCKET_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
