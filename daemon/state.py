"""The daemon's own folder: what lies where, and who may use it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from daemon.errors import AlreadyRunning, ConfigError

LEDGER = "ledger.sqlite"
DATABASE = ("-wal", "-shm", "")  # the names of SQLite's files, behind the ledger's
CONTROL = "control.sock"
LOCK = "lock"
SOCKET_BYTES = 107  # unix(7)


@contextlib.contextmanager
def lock_state(folder: Path) -> Iterator[None]:
    """Hold the folder for this process alone, until the end of the context or of the process.

    Raises AlreadyRunning, ConfigError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError([f"state.path: {folder} cannot be used: {error.strerror}."]) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(f"Another visiond works with {folder}. Stop it, or name another [state] path.") from None
        yield
    finally:
        os.close(fd)


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
