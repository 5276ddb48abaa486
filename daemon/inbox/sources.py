"""Moves, copies, links or deletes the source of an image that has ended,
and never another version that took its place."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import filecmp
import itertools
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence

from daemon.core.errors import SourceChanged
from daemon.core.files import create, temporary_name
from daemon.core.jobs import Placed, Version
from daemon.core.sidecar import LONGEST_NAME, cut_name
from daemon.ledger.record import Record
from daemon.system.beneath import FOLDER, READ, open_beneath, rename_to_free
from stages.contract.folders import sync

COPIED_BYTES = 1 << 20  # at once
WRITER_SECONDS = 600.0  # for which a file that is open for writing is not judged
QUIET_SECONDS = 1.0  # since the last change of a file that was moved
WRITTEN = "another program has it open for writing"
SOUGHT = "it is not there, and the first scan of its inbox, which may find it under another name, goes on"
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)  # no file has such a name


def move(record: Record, target: bytes) -> Placed:
    """Rename the source, or copy it across file systems. A
    file that already has the target's name is left alone.

    A source that is a different version by now stays: it gets its own row and result.
    """
    taken = taken_names(target, record.id)
    if record.location in taken:  # it failed, was tried again, and failed again
        return Placed(record.id)
    final: bytes | None
    if not _is_same(record, record.location):
        final = next((path for path in reversed(taken) if _is_same(record, path)), None)  # before a crash
        if final:
            delete(record)  # in case the crash came before the deletion was complete
    else:
        final = next(path for path in _names(target, record.id) if not _is_there(path))
        os.makedirs(os.path.dirname(final), exist_ok=True)
        try:
            _take(record, final)
        except OSError as error:
            if error.errno != errno.EXDEV:  # two mounts of one file system give it too
                raise
            final = _move_across(record, final, taken)
    return Placed(record.id, final, Version.of(os.lstat(final))) if final else Placed(record.id)


def _move_across(record: Record, final: bytes, taken: Sequence[bytes]) -> bytes | None:
    """Copy the source to another file system, and delete it. Returns where it is; None if it is a different version by now."""
    # A crash, or a failed deletion, may have left a copy.
    copied = next((path for path in taken if _is_copy(record, path)), None)
    if not copied and not copy(record, final, replaces=False):
        return None
    sync(os.path.dirname(copied or final))  # otherwise a power failure might leave neither file
    delete(record)
    return copied or final


def copy(record: Record, target: bytes, *, replaces: bool = True) -> bool:
    """Copy the file that was opened, even if it or a folder on its path is replaced during that. replaces: a file that has the
    target's name. Returns whether the source, and so the copy, is there. Raises OSError."""
    if not _is_same(record, record.location):
        return False
    if record.location == target:
        return True
    temporary = temporary_name(target)
    try:
        with open(os.open(record.location, READ), "rb") as source, open(create(temporary), "wb") as taken:
            status = _expect(record, source.fileno())
            shutil.copyfileobj(source, taken, COPIED_BYTES)
            taken.flush()
            os.fchmod(
                taken.fileno(), status.st_mode & 0o777
            )  # the copy is owned by this user: set-user-id would give others its rights
            os.utime(taken.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fsync(taken.fileno())  # the source may be deleted next
            _expect(record, source.fileno())  # again, as it may have been written to
        (os.rename if replaces else rename_to_free)(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return True


def link(source: bytes, target: bytes) -> None:
    """Make a symbolic link. A hard link would change the source's change time, and so make it a new version."""
    if source == target:
        return
    temporary = temporary_name(target)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    os.symlink(source, temporary)
    os.rename(temporary, target)


def delete(record: Record) -> None:
    """Delete the source. It is renamed first, so that a version that takes its place at that moment is not deleted.
    A file of somebody else that has the temporary name stays. Raises OSError."""
    names = [temporary_name(record.location), temporary_name(b"%b~%d" % (record.location, record.id))]
    if _is_same(record, record.location):
        aside = next((name for name in names if not os.path.lexists(name)), None)
        if aside is None:
            raise FileExistsError(errno.EEXIST, "its temporary names are taken by other files", names[0])
        _take(record, aside)
    for aside in names:
        if _is_same(record, aside):  # just now, or before a crash
            os.unlink(aside)


def taken_names(target: bytes, number: int) -> list[bytes]:
    """The names for a source at `target` that some file already has."""
    names = _names(target, number)
    first = [path for path in itertools.islice(names, 2) if _is_there(path)]
    return first + list(itertools.takewhile(_is_there, names))


def _is_there(path: bytes) -> bool:
    """Raises OSError if the disk does not say: a rename to a name that is only thought to be free replaces a file."""
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return False
    return True


def _names(target: bytes, number: int) -> Iterator[bytes]:
    """a.jpg, a~7.jpg, a~7.2.jpg, a~7.3.jpg …"""
    yield target
    for again in itertools.count(1):
        yield numbered_name(target, number, again)


def numbered_name(target: bytes, number: int, again: int = 1) -> bytes:
    """The name of a source if another file already has its first name: a~7.jpg or, again, a~7.2.jpg. What gets too long is
    cut before the ~."""
    folder, name = os.path.split(target)
    stem, suffix = os.path.splitext(name)
    mark = b"~%d%b%b" % (number, b"" if again == 1 else b".%d" % again, suffix)
    return os.path.join(folder, cut_name(stem, LONGEST_NAME - len(mark)) + mark)


def _is_same(record: Record, path: bytes) -> bool:
    """Whether the file at `path` is the version that has this result."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if path == record.location:
        return record.version.is_of(status, moved=record.has_moved)
    now = Version.of(status)  # a copy has another inode
    return (now.size, now.mtime_ns) == (record.version.size, record.version.mtime_ns)


def _is_copy(record: Record, path: bytes) -> bool:
    """Whether the file at `path` has the same bytes as the source."""
    filecmp.clear_cache()  # it would remember its answer for files of the same sizes and times
    return _is_same(record, path) and filecmp.cmp(record.location, path, shallow=False)


def _take(record: Record, target: bytes) -> None:
    """Rename the source to `target`. If another version took its place at the last moment, or somebody has opened it for
    writing, rename that back."""
    name = os.path.basename(record.location)
    with _opened_folder(record) as folder, _asked_for_writers(name, folder) as is_written:
        written = OSError(errno.ETXTBSY, WRITTEN, record.location)
        if is_written():
            raise written
        rename_to_free(name, target, src_dir_fd=folder)
        is_same = record.version.is_of(os.lstat(target), moved=True)  # a rename keeps the inode
        if not is_same:
            _put_back(target, name, folder)
            raise _replaced(record)
        if is_written() and _put_back(target, name, folder):
            raise written


def _put_back(target: bytes, name: bytes, folder: int) -> bool:
    """Whether it has its name in the folder again. Not if a new file has that name: then both stay."""
    try:
        os.link(target, name, dst_dir_fd=folder, follow_symlinks=False)  # a rename would replace a new file
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        os.rename(target, name, dst_dir_fd=folder)
        return True
    os.unlink(target)
    return True


def find_changed(files: Sequence[tuple[int, bytes, Version]]) -> dict[int, Version]:
    """The present version of those files that somebody has written to where the daemon has moved them, and has finished as far
    as that can be seen. files: with their ids, and the versions that were moved there."""
    changed, now = {}, time.time()
    for id, path, version in files:
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            present, is_fresh = Version.of(status), 0 <= now - status.st_ctime < QUIET_SECONDS
            same_file = stat.S_ISREG(status.st_mode) and present.inode == version.inode
            if not same_file or (present.size, present.mtime_ns) == (version.size, version.mtime_ns):
                continue
            if not is_fresh and not _is_written(path):
                changed[id] = present
    return changed


def is_still_written(path: bytes, seen_at: float) -> bool:
    """Whether somebody on this machine has the file open for writing, as far as that can be seen, and not for so long that
    it counts as complete. seen_at: Unix seconds."""
    return 0 <= time.time() - seen_at < WRITER_SECONDS and _is_written(path)  # the clock may have been set


def _is_written(path: bytes) -> bool:
    with _asked_for_writers(path) as is_written:
        return is_written()


@contextlib.contextmanager
def _asked_for_writers(path: bytes, folder: int | None = None) -> Iterator[Callable[[], bool]]:
    """A function that says whether a program has the file open for writing. The system then refuses a read lease (fcntl(2),
    F_SETLEASE). It gives leases only to the owner of the file (or with CAP_LEASE), not on every file system, and knows
    nothing of other machines: false there. folder: the descriptor of the one that `path` is relative to."""
    try:
        fd = os.open(path, READ, dir_fd=folder)
    except OSError as error:
        refused = error.errno == errno.EAGAIN  # a file server has a lease to write to it
        yield lambda: refused
        return

    def is_written() -> bool:
        try:
            # If somebody opens the file at that moment, this process gets a signal, by default one that ends it.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)  # others wait for it when they open the file
        except OSError as error:
            return error.errno == errno.EAGAIN
        return False

    try:
        yield is_written
    finally:
        os.close(fd)


def _expect(record: Record, fd: int) -> os.stat_result:
    """The status of an open file, which must be the source. Raises OSError if it is not."""
    status = os.fstat(fd)
    if not record.version.is_of(status, moved=record.has_moved):
        raise _replaced(record)
    return status


def _replaced(record: Record) -> OSError:
    return SourceChanged(errno.EAGAIN, "another file has replaced it", record.location)


@contextlib.contextmanager
def _opened_folder(record: Record) -> Iterator[int]:
    """A descriptor of the folder with the source, so that no link that
    someone puts on the path later can lead to another file of that name."""
    folder = os.path.dirname(record.location if record.has_moved else record.path)
    fd = os.open(folder, FOLDER) if record.has_moved else open_beneath(record.inbox_path, folder or b".")
    try:
        yield fd
    finally:
        os.close(fd)
