"""The output folders belong to one daemon: two daemons with
separate state folders must not write to the same ones.

The folder itself is locked, so that no new file appears among the results. On a network mount the lock may
be valid on this machine only; if there are no locks at all, the daemon says so and works without them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import structlog

from daemon.config.loading import Config
from daemon.core.errors import AlreadyRunning
from daemon.system.mounts import is_there

log = structlog.get_logger()

LOCKS = Path("/proc/locks")


@contextlib.contextmanager
def lock_outputs(config: Config, *, make: bool = True) -> Iterator[None]:
    """Lock the output folders for this process until the end of the context, or of the process. make: make
    the folder for sidecars if it does not exist. Daemons whose inboxes have different names may share the top
    folders.

    Raises AlreadyRunning.
    """
    with contextlib.ExitStack() as stack:
        modes = _modes(config)
        for folder, mode in sorted(modes.items()):
            _lock(stack, folder, mode, make=make and folder.is_relative_to(config.output.results))
        own = {identity for folder in modes if (identity := _identity_of(folder))}
        for folder in sorted({above for each in modes for above in Path(os.path.realpath(each)).parents}):
            if _identity_of(folder) not in own:
                _lock_above(stack, folder)
        yield


def _identity_of(folder: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _lock_above(stack: contextlib.ExitStack, folder: Path) -> None:
    """Share a folder above one of ours: another daemon must not have it, or get it, for its results. Raises
    AlreadyRunning."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    stack.callback(os.close, fd)
    if os.fstat(fd).st_mode & stat.S_ISVTX:  # as /tmp, where a lock tells others to clean nothing up
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AlreadyRunning(
            f"Another visiond writes its results to {folder}{_holder_of(fd)}, and yours would be inside that. Name "
            "other folders in [output]."
        ) from None
    except OSError:  # it has no locks
        return


def _modes(config: Config) -> dict[Path, int]:
    """The mode of each folder's lock: exclusive, or shared
    for those that may have sub-folders of several daemons."""
    output = config.output
    tops = [output.results, output.failed]
    tops += [output.bins_folder] if output.bins != "none" else []
    tops += [output.done] if any(inbox.on_success == "move" for inbox in config.inbox) else []
    modes: dict[Path, int] = {}
    for inbox in config.inbox:
        for top in tops:
            modes.setdefault(top, fcntl.LOCK_SH)
            modes[top / inbox.name] = fcntl.LOCK_EX  # the top folder itself for an inbox without a name
    return modes


def _lock(stack: contextlib.ExitStack, folder: Path, mode: int, *, make: bool) -> None:
    if is_there(folder) is None:  # a dead mount, which is reported elsewhere
        return
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it does not exist yet, or cannot be used, which is reported when something is written
        return
    stack.callback(os.close, fd)
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        taken = f"{folder}{_holder_of(fd)}"
        raise AlreadyRunning(
            f"Another visiond writes its results to {taken}. Stop it, or name other folders in [output]."
        ) from None
    except OSError as error:
        said = "folder cannot be locked; make sure that no other visiond writes to it"
        log.warning(said, path=str(folder), error=error.strerror)


def _holder_of(fd: int) -> str:
    """The process that has the lock, from the kernel's list;
    empty if it is not there (another container or machine)."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        for line in LOCKS.read_text().splitlines():  # "1: FLOCK  ADVISORY  WRITE 17349 fe:00:2149806 0 EOF"
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == device and int(fields[4]) > 0:
                return f", as process {fields[4]}"
    return ""
