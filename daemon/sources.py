"""The source of an image that has its end: moved, copied, linked to or deleted, and never another version in its place."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator

from daemon.beneath import FOLDER, READ, open_beneath
from daemon.files import sync_folder
from daemon.jobs import Placed, Version
from daemon.records import Record

COPIED_BYTES = 1 << 20  # at once


def move(record: Record, target: bytes) -> Placed:
    """Rename the source, or copy it across file systems; what has the target's name already is left alone.

    A source that is another version by now stays: it will have a row and a result of its own.
    """
    taken = taken_names(target, record.id)
    if record.location in taken:  # it failed, was tried again and failed again
        return Placed(record.id)
    if not _is_same(record, record.location):
        done = next((path for path in reversed(taken) if _is_same(record, path)), None)  # before a crash
        if done is None:
            return Placed(record.id)
        delete(record)  # the last of it, if the crash was in the middle of that
        return Placed(record.id, done, Version.of(os.lstat(done)))
    final = next((path for path in taken if _is_copy(record, path)), None)  # of before a crash
    final = final or next(path for path in _names(target, record.id) if not os.path.lexists(path))
    os.makedirs(os.path.dirname(final), exist_ok=True)
    try:
        _take(record, final)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        if final not in taken:
            copy(record, final)
        sync_folder(os.path.dirname(final))  # or a power failure might leave neither
        delete(record)
    return Placed(record.id, final, Version.of(os.lstat(final)))


def copy(record: Record, target: bytes) -> None:
    """From the file that was opened, whatever is put in its place or in that of a folder on its way meanwhile."""
    if not _is_same(record, record.location):
        return
    temporary = temporary_name(target)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        with open(os.open(record.location, READ), "rb") as source, open(temporary, "wb") as taken:
            status = _expect(record, source.fileno())
            shutil.copyfileobj(source, taken, COPIED_BYTES)
            taken.flush()
            os.fchmod(taken.fileno(), status.st_mode & 0o777)  # the copy is ours: set-user-id would lend our rights
            os.utime(taken.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fsync(taken.fileno())  # the source may be deleted next
            _expect(record, source.fileno())  # still: it may have been written to
        os.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def link(source: bytes, target: bytes) -> None:
    """A symbolic link: a hard link would change the source's change time and make another version of it."""
    temporary = temporary_name(target)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    os.symlink(source, temporary)
    os.rename(temporary, target)


def delete(record: Record) -> None:
    """Remove the source, under another name first, so that a version that slips in is not the one that goes."""
    aside = temporary_name(record.location)
    if _is_same(record, record.location):
        _take(record, aside)
    if _is_same(record, aside):  # just now, or before a crash
        os.unlink(aside)


def second_name(target: bytes, number: int) -> bytes:
    """What a source is called where another file has its name already."""
    return next(itertools.islice(_names(target, number), 1, None))


def taken_names(target: bytes, number: int) -> list[bytes]:
    """Of the names that a source may have at `target` those that some file has."""
    names = _names(target, number)
    first = [path for path in itertools.islice(names, 2) if os.path.lexists(path)]
    return first + list(itertools.takewhile(os.path.lexists, names))


def _names(target: bytes, number: int) -> Iterator[bytes]:
    """a.jpg, a~7.jpg, a~7.2.jpg, a~7.3.jpg …"""
    stem, suffix = os.path.splitext(target)
    yield target
    yield b"%b~%d%b" % (stem, number, suffix)
    yield from (b"%b~%d.%d%b" % (stem, number, again, suffix) for again in itertools.count(2))


def temporary_name(path: bytes) -> bytes:
    """A name beside `path`, always the same for it, so that a crash leaves at most one and the next try uses it up."""
    folder, name = os.path.split(path)
    return os.path.join(folder, b".visiond-" + hashlib.sha256(name).hexdigest()[:24].encode() + b".tmp")


def _is_same(record: Record, path: bytes) -> bool:
    """Whether the file at `path` is the version the result is of."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return _is_version(record, status, at_source=path == record.location)


def _is_version(record: Record, status: os.stat_result, *, at_source: bool) -> bool:
    now = Version.of(status)
    if (now.size, now.mtime_ns) != (record.version.size, record.version.mtime_ns):
        return False
    # A rename moves the change time and a copy has its own inode, so these are no evidence anywhere but at the source.
    return not at_source or now.inode == record.version.inode


def _is_copy(record: Record, path: bytes) -> bool:
    """Whether the file at `path` has the source's very bytes, on a file system that it can only be copied to."""
    if not _is_same(record, path) or os.lstat(path).st_dev == os.lstat(record.location).st_dev:
        return False
    return filecmp.cmp(record.location, path, shallow=False)


def _take(record: Record, target: bytes) -> None:
    """Rename the source to `target`; it goes back should another version have slipped in at the last moment."""
    name = os.path.basename(record.location)
    with _opened_folder(record) as folder:
        os.rename(name, target, src_dir_fd=folder)
        if not _is_version(record, os.lstat(target), at_source=True):  # its inode came along
            os.rename(target, name, dst_dir_fd=folder)
            raise _replaced(record)


def _expect(record: Record, fd: int) -> os.stat_result:
    """What is opened there is the source."""
    status = os.fstat(fd)
    if not _is_version(record, status, at_source=True):
        raise _replaced(record)
    return status


def _replaced(record: Record) -> OSError:
    return OSError(errno.EAGAIN, "it was replaced meanwhile", record.location)


@contextlib.contextmanager
def _opened_folder(record: Record) -> Iterator[int]:
    """A descriptor of the folder that holds the source: no other file of that name is taken, whatever link is laid on the
    way to it meanwhile."""
    in_inbox = record.location == os.path.join(record.inbox_path, record.path)
    folder = os.path.dirname(record.path if in_inbox else record.location)
    fd = open_beneath(record.inbox_path, folder or b".") if in_inbox else os.open(folder, FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)
