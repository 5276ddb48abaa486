"""The state folder: its files, and who may use it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from daemon.core.errors import AlreadyRunning, ConfigError
from daemon.core.files import DATABASE
from daemon.system.scarcity import cause_of
from stages.contract.files import find_other_kind

LEDGER = "ledger.sqlite"
IDENTITY = "identity"  # the id of the ledger that belongs here
CONTROL = "control.sock"
LOCK = "lock"
UPKEEP = "upkeep.json"
NAMES = "inboxes.json"
PROFILE = "tuning.json"  # what `visiond tune` measured
TUNING = "tuning-"  # how the folders begin in which it works
KERNELS = "kernels"  # compiled for the GPU, so that only the first start compiles them
CANARY = "canary"  # the first answers of models to known images
PICTURES = "pictures"  # small ones, for the page; may be deleted
PAGE_TOKEN = "page.token"  # for changes by the page
SINK_FILES = "files.sqlite"  # which image has which file of a sink
LABELS = "labels.sqlite"  # what people say about images
SEARCH = "search"  # made from the ledger; may be deleted
WANDB = "wandb"  # what `visiond tune --wandb` sends, as that library keeps it; may be deleted
OWN = (  # in addition to the ledger
    IDENTITY, CONTROL, LOCK, UPKEEP, NAMES, PROFILE, TUNING, KERNELS, CANARY, PICTURES, PAGE_TOKEN, SINK_FILES, LABELS, SEARCH,
    WANDB,
)  # fmt: skip
SOCKET_BYTES = 107  # unix(7)
FLOCK = "hhqqi4x"  # struct flock of fcntl(2), on 64 bits


@contextlib.contextmanager
def lock_state(folder: Path) -> Iterator[None]:
    """Lock the folder for this process, until the end of the context or of the process.

    Other users cannot read it, and only the owner and group
    can read what this process creates during that time.

    Raises AlreadyRunning, ConfigError.
    """
    check_files(folder)
    with closed_to_others(), _locked(folder):
        yield


def check_files(folder: Path) -> None:
    """Raises ConfigError if something has the name of a file in the state folder and is none: to open a FIFO takes for ever,
    and SQLite does not say what it finds."""
    for name in (
        *(f"{LEDGER}{suffix}" for suffix in DATABASE),
        IDENTITY,
        LOCK,
        UPKEEP,
        NAMES,
        PROFILE,
        PAGE_TOKEN,
        SINK_FILES,
        LABELS,
    ):
        try:
            kind = find_other_kind(folder / name)
        except OSError:  # it is reported when the file is opened
            continue
        if kind:
            raise ConfigError([f"state.path: {folder / name} is {kind}; it must be a file. Move it away."])


@contextlib.contextmanager
def closed_to_others() -> Iterator[None]:
    """Within the context, only the owner and group can read new files and folders of any thread or child.
    A stricter umask is kept."""
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
        raise _cannot_use(folder, error) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = f" (process {pid})" if (pid := _holder_of(fd)) else ""
            raise AlreadyRunning(
                f"Another visiond is using {folder}{holder}. Stop it, or set another [state] path."
            ) from None
        except OSError as error:  # some network file systems have no locks
            raise _cannot_use(folder, error) from error
        with contextlib.suppress(OSError):
            # This lock keeps nobody out, but names the process that holds it.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _cannot_use(folder: Path, error: OSError) -> ConfigError:
    return ConfigError([f"state.path: cannot use {folder}: {cause_of(error)}."])


def _shut(folder: Path) -> None:
    """Remove the permissions of other users, which an older visiond gave. The group's permissions are the
    administrator's choice. If the folder contains other files too, it stays open, and only our own files are
    closed."""
    entries = list(folder.iterdir())
    own = [entry for entry in entries if entry.name.startswith((LEDGER, *OWN, *(f".{name}" for name in OWN)))]
    for path in [folder] if len(own) == len(entries) else own:
        status = path.lstat()
        if (
            status.st_uid == os.geteuid()
            and status.st_mode & stat.S_IRWXO
            and not stat.S_ISLNK(status.st_mode)
        ):
            path.chmod(stat.S_IMODE(status.st_mode) & ~stat.S_IRWXO)


def find_holder(folder: Path) -> int:
    """The process that has locked the folder; 0 if there is none or it is unknown. Not for that process itself:
    it would cease to be named when the file is closed (fcntl(2))."""
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return _holder_of(fd)
    finally:
        os.close(fd)


def _holder_of(fd: int) -> int:
    """The process that holds the lock, from the kernel; 0 if it is unknown,
    for example in another container."""
    question = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with contextlib.suppress(OSError):
        pid: int = struct.unpack(FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, question))[-1]
        return max(0, pid)
    return 0


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """A path of a socket that fits into an address, which has SOCKET_BYTES:
    a longer path goes by its folder's descriptor. Raises OSError."""
    if len(os.fsencode(path)) <= SOCKET_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
