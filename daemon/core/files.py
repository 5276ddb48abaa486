"""Makes, writes and renames files completely or not at all, and flushes file systems."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shlex
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from daemon.core.errors import NotWritable, WrongArgument
from stages.contract.folders import sync

STDOUT = Path("-")
DATABASE = ("-wal", "-shm", "")  # suffixes of SQLite's files
PARQUET = b"PAR1"  # how a Parquet file begins
SIDECAR = b'{"schema":"visiond/'  # how a sidecar begins
VERSION = b"visiond.version"  # in the metadata of a Parquet file that visiond wrote
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_libc = ctypes.CDLL(None, use_errno=True)
# By device: who flushes it now, and those that have lost something.
_turns: dict[int, threading.Lock] = {}
_lost: dict[int, int] = {}  # with the error's number


class NotSynced(OSError):
    """The system has lost data that it had accepted for writing."""


@contextlib.contextmanager
def written_whole(
    file: Path, ledger: Path, *, force: bool = False, begins: tuple[bytes, ...] = ()
) -> Iterator[Path]:
    """A temporary file in the same folder, which gets the name `file` at the end of the context.
    force: replace an existing file, which may be the last good backup. begins: only if it is empty or begins with one of
    these, as what the command writes does: a mistyped name may be that of a photograph.

    Raises NotWritable, and WrongArgument for the ledger's own files: a daemon would continue to write to the replaced one.
    """
    file = file.resolve()
    check_free(file, ledger, force=force, begins=begins)
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        yield partial
        sync(partial)  # otherwise a power failure might leave an empty file with this name
        rename_durably(partial, file)
    except OSError as error:
        raise NotWritable(f"{file} cannot be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def rename_durably(file: Path, name: Path) -> None:
    """Rename a file or a folder so that a power failure does not bring the old name back. Raises OSError."""
    os.replace(file, name)
    sync(name.parent)


def check_free(file: Path, ledger: Path, *, force: bool, begins: tuple[bytes, ...]) -> None:
    """Raises what `written_whole` does if a file of this name may not be made, or not be replaced."""
    file = file.resolve()
    if file in [Path(f"{ledger.resolve()}{suffix}") for suffix in DATABASE]:
        raise WrongArgument(f"{file} is the ledger itself; name another file.")
    if file.exists() and not file.is_file():
        raise NotWritable(f"{file} is not a regular file, so it cannot be replaced. Name a file.")
    if file.exists() and not force:
        raise NotWritable(f"{file} already exists; name another file, or replace it with --force.")
    if begins and file.exists() and not _is_replaceable(file, begins):
        raise NotWritable(
            f"{file} is no file of this command, so --force does not replace it. Name another file, or delete it first: "
            f"rm {shlex.quote(str(file))}"
        )


def _is_replaceable(file: Path, begins: tuple[bytes, ...]) -> bool:
    """Raises NotWritable if it cannot be read."""
    try:
        with file.open("rb") as opened:
            start = opened.read(max(map(len, begins)))
            is_ours = not start.startswith(PARQUET) or VERSION in _read_footer(opened)
    except OSError as error:
        raise NotWritable(f"{file} cannot be read: {error.strerror}. Name another file.") from error
    return not start or (start.startswith(begins) and is_ours)


def _read_footer(file: BinaryIO) -> bytes:
    """The schema and metadata of a Parquet file, whose size stands before its last four bytes. Of a file that was cut short,
    some bytes at its end. Raises OSError."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 8))
    size = int.from_bytes(file.read(4), "little")
    file.seek(max(0, end - 8 - size))
    return file.read()


def temporary_name(path: bytes) -> bytes:
    """A name in the same folder, always the same for a path: a crash leaves at most one such file,
    and the next reuses it."""
    folder, name = os.path.split(path)
    return os.path.join(folder, b".visiond-" + hashlib.sha256(name).hexdigest()[:24].encode() + b".tmp")


def create(path: bytes) -> int:
    """A descriptor of a new file; its folder is made if there is none. What has its name goes: a crash has left it, or
    somebody else a link, which would lead to another file, or a FIFO, which would be waited for. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except FileExistsError:
        os.unlink(path)
    return os.open(path, flags, 0o666)


def sync_folders(folders: Iterable[bytes]) -> None:
    """Flush the file systems of these folders to the disk. One call for each file system costs a small part
    of a call for each file. Raises NotSynced, and OSError when a folder cannot be opened. Runs in a thread.
    """
    synced = set()
    for folder in folders:
        try:
            fd = _open_folder(folder)
        except OSError as error:
            if error.errno not in _NO_FOLDER:  # nothing has been published there
                raise
            continue
        try:
            device = os.fstat(fd).st_dev
            if device not in synced:
                sync_file_system(fd)
            synced.add(device)
        finally:
            os.close(fd)


def _open_folder(folder: bytes) -> int:
    """A folder, or if it may be written to but not be read, one above it on the same file system. Raises OSError."""
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        above = os.path.dirname(folder)
        if above == folder or os.stat(above).st_dev != os.stat(folder).st_dev:
            raise
        return _open_folder(above)


def sync_file_system(fd: int) -> None:
    """Flush the file system of an open file or folder to the disk. Raises NotSynced, and from then on each time: the system
    tells only the first who asks, whosever files it has lost. Runs in a thread."""
    device = os.fstat(fd).st_dev
    with _turns.setdefault(device, threading.Lock()):
        if device not in _lost and _libc.syncfs(fd):
            _lost[device] = ctypes.get_errno()
    if number := _lost.get(device):
        raise NotSynced(number, os.strerror(number), os.readlink(f"/proc/self/fd/{fd}"))


@contextlib.contextmanager
def written_into(folder: Path) -> Iterator[None]:
    """Raises NotWritable if something in the folder, or the folder itself, cannot be made."""
    try:
        yield
    except OSError as error:
        raise NotWritable(
            f"{error.filename or folder} cannot be written: {error.strerror or error}."
        ) from error
