"""Reads files, and nothing else that has the name of one."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

Name = str | bytes | Path
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotAFile(OSError):
    """What a name leads to cannot be read, or that could take for ever: a FIFO, a device, a link to itself."""


def find_other_kind(path: Name) -> str:
    """What a path is that is there and is no file, for example "a FIFO"; otherwise empty. Raises OSError."""
    try:
        return KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "")
    except FileNotFoundError:
        return ""


def open_file(path: Name) -> BufferedReader:
    """Open a file for reading. Raises OSError, for something else than a file NotAFile or IsADirectoryError."""
    return open(path, "rb", opener=_open)


def read_file(path: Name) -> bytes:
    """Raises OSError, as `open_file`."""
    with open_file(path) as file:
        return file.read()


def _open(path: str, flags: int) -> int:
    try:
        kind = find_other_kind(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotAFile(errno.ELOOP, "a link on its path leads to itself", path) from error
        raise
    if kind and kind != KINDS[stat.S_IFDIR]:  # a socket cannot even be opened
        raise NotAFile(errno.EINVAL, f"it is {kind}, not a file", path)
    return os.open(path, flags | os.O_NONBLOCK)
