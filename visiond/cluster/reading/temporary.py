"""The temporary folders of actors, and the room on their disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from daemon.core.errors import VisiondError
from daemon.unpacking.folder import NoRoom, check_room
from stages.contract.processes import locked_folder

FOLDERS = "visiond-unpacking-"  # the names of the temporary folders begin with this
FRESH = "visiond-begun-"  # and those of folders that are not locked yet with this
FULL = (errno.ENOSPC, errno.EDQUOT)
ATTEMPTS = 3  # at writing what finds no room
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # seconds, until others have made room
BLOCK_BYTES = 512  # of st_blocks
T = TypeVar("T")


class TemporaryUnusable(VisiondError):
    """Nothing can be written into the folder for temporary files: no input is the cause."""

    exit_status = os.EX_IOERR

    def __init__(self, problem: str, remedy: str = "Solve that") -> None:
        super().__init__(
            f"Nothing can be unpacked in {name_disk()} on {os.uname().nodename}: {problem}. {remedy}, or set TMPDIR to "
            "another folder; then run the same command with --resume."
        )


def name_disk() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # it has tried to write there
        return os.environ.get("TMPDIR", "/tmp")


@contextlib.contextmanager
def held_folder() -> Iterator[Path]:
    """A temporary folder that is locked as long as it is used. Raises TemporaryUnusable."""
    with contextlib.ExitStack() as stack:
        try:
            fresh = Path(tempfile.mkdtemp(prefix=FRESH))
            stack.enter_context(locked_folder(fresh))
            # Only now may another actor's `remove_leftovers` see it.
            folder = fresh.rename(fresh.with_name(FOLDERS + fresh.name.removeprefix(FRESH)))
        except OSError as error:
            raise _unusable(error) from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def remove_leftovers() -> None:
    """Remove the folders of actors that were killed: nobody holds their locks. Raises TemporaryUnusable."""
    try:
        disk = tempfile.gettempdir()
    except OSError as error:
        raise _unusable(error) from error
    for folder in Path(disk).glob(f"{FOLDERS}*"):
        with contextlib.suppress(OSError), locked_folder(folder):
            shutil.rmtree(folder)


def _unusable(error: OSError) -> TemporaryUnusable:
    return TemporaryUnusable(
        error.strerror or str(error), "Make room" if error.errno in FULL else "Solve that"
    )


def with_room(folder: Path, work: Callable[[], T]) -> T:
    """What `work` returns, which writes into a temporary folder and removes it again if it fails. When the disk is full
    it is tried again, as neighbors unpack there too.

    Raises NoRoom if it needs more room than there is, OSError, and TemporaryUnusable if others fill the disk.
    """
    for attempt in range(ATTEMPTS):
        _wait_for_room(folder)
        try:
            return work()
        except NoRoom:
            pass
        except OSError as error:
            if error.errno not in FULL:
                raise
        if attempt < ATTEMPTS - 1:
            time.sleep(PAUSES[attempt])
    _wait_for_room(folder)
    raise NoRoom(is_new=True)


def _wait_for_room(folder: Path) -> None:
    """Until others have made room. Raises TemporaryUnusable."""
    for seconds in PAUSES:
        if not _is_full(folder):
            return
        time.sleep(seconds)
    if _is_full(folder):
        raise TemporaryUnusable("its disk is nearly full", "Make room")


def _is_full(folder: Path) -> bool:
    """Whether its disk would be nearly full also without what is in this folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            check_room(fd)
        except NoRoom:  # to count what is in the folder takes long, if it has many files
            check_room(fd, -_count_bytes(fd))
    except NoRoom:
        return True
    finally:
        os.close(fd)
    return False


def _count_bytes(folder: int) -> int:
    return BLOCK_BYTES * sum(
        os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks
        for _, _, names, fd in os.fwalk(".", dir_fd=folder)
        for name in names
    )
