from __future__ import annotations

import errno
import hashlib
import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from daemon.core.jobs import GONE, Extent, Failure, Job, Read, Version
from daemon.core.slab import Slab
from daemon.inbox import disk
from daemon.inbox.disk import NETWORK_READERS, READERS, FolderOrigin
from stages.contract.base import Reason
from tests.daemon_process import PATIENCE
from tests.makers import make_job


@pytest.fixture
def slab() -> Iterator[Slab]:
    opened = Slab(1 << 20)
    yield opened
    opened.close()


NUMBERS = itertools.count(1)


def drop(inbox: Path, path: bytes = b"a.jpg", data: bytes = b"bytes of an image") -> Job:
    """A file in the inbox, and the job of its current version."""
    location = os.path.join(os.fsencode(inbox), path)
    with open(location, "wb") as file:
        file.write(data)
    return make_job(path, id=next(NUMBERS), version=Version.of(os.stat(location)))


def moved(inbox: Path) -> Job:
    """The job of a file that the daemon has moved to the failed folder."""
    job, location = drop(inbox), os.fsencode(inbox.parent / "failed.jpg")
    os.rename(inbox / "a.jpg", location)
    return replace(job, location=location, version=Version.of(os.stat(location)))


def take_in(slab: Slab, inbox: Path, *jobs: Job) -> list[tuple[Read, bytes]]:
    """What came of reading each file, and what is in the slab then."""
    extents = [slab.try_reserve(job.version.size) or Extent(0, 0) for job in jobs]
    read = FolderOrigin(os.fsencode(inbox)).read(list(zip(jobs, extents, strict=True)), slab)
    return [(read[job.id], bytes(slab.window(extent))) for job, extent in zip(jobs, extents, strict=True)]


def digest_of(data: bytes) -> Read:
    return Read(hashlib.sha256(data).digest())


DATA = b"bytes of an image"


def share_out(monkeypatch: pytest.MonkeyPatch, cores: int, *, far: bool = False, large: bool = True) -> None:
    """A machine with so many cores. far: its inboxes are on a network mount. large: every byte is worth a thread."""
    monkeypatch.setattr(disk, "count_cores", lambda: cores)
    monkeypatch.setattr(disk, "is_network_mount", lambda _path: far)
    if large:
        monkeypatch.setattr(disk, "READER_BYTES", 1)


def drop_many(inbox: Path, count: int) -> list[Job]:
    return [drop(inbox, b"%d.jpg" % number) for number in range(count)]


def test_a_files_bytes_are_in_the_slab_with_their_digest(inbox: Path, slab: Slab) -> None:
    job = drop(inbox)
    assert take_in(slab, inbox, job) == [(digest_of(DATA), DATA)]


@pytest.mark.parametrize("cores", [1, 64])
def test_while_no_file_can_be_opened_no_file_is_blamed(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    share_out(monkeypatch, cores)
    jobs = [drop(inbox, b"a.jpg"), drop(inbox, b"b.jpg")]
    with monkeypatch.context() as patch:

        def refuse(*_arguments: object, **_options: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            take_in(slab, inbox, *jobs)
    assert [read for read, _ in take_in(slab, inbox, *jobs)] == [digest_of(DATA)] * 2


def test_the_slab_can_be_closed_while_an_error_of_reading_is_kept(
    inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_options: object) -> int:
        raise OSError(errno.ENFILE, "Too many open files in system")

    slab, job = Slab(1 << 20), drop(inbox)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="in system") as kept:
            take_in(slab, inbox, job)
    slab.close()
    assert kept.value.__traceback__


def test_images_that_failed_to_be_read_just_before_a_pause_are_read_again_with_the_others(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [drop(inbox, name) for name in (b"failing.jpg", b"missing.jpg", b"last.jpg")]
    numbers = iter([errno.EIO, errno.ENOENT, errno.EMFILE])
    with monkeypatch.context() as patch:

        def refuse(*_arguments: object, **_options: object) -> int:
            number = next(numbers)
            raise OSError(number, os.strerror(number))

        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            take_in(slab, inbox, *jobs)
    assert [read for read, _ in take_in(slab, inbox, *jobs)] == [digest_of(DATA)] * 3


def test_an_empty_file_has_a_digest_too(inbox: Path, slab: Slab) -> None:
    job = drop(inbox, data=b"")
    assert take_in(slab, inbox, job) == [(digest_of(b""), b"")]


def test_a_name_need_not_be_utf8(inbox: Path, slab: Slab) -> None:
    job = drop(inbox, b"\xff\xfe\n.jpg", b"odd")
    assert take_in(slab, inbox, job) == [(digest_of(b"odd"), b"odd")]


def test_a_file_the_daemon_moved_is_read_where_it_lies_now(inbox: Path, slab: Slab) -> None:
    job = moved(inbox)
    assert take_in(slab, inbox, job) == [(digest_of(DATA), DATA)]


@pytest.mark.parametrize("cores", [1, 64])
def test_a_file_that_cannot_be_read_affects_no_other_file_of_its_group(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    share_out(monkeypatch, cores)
    jobs = [drop(inbox, name) for name in (b"1.jpg", b"2.jpg", b"3.jpg")]
    os.unlink(inbox / "2.jpg")
    read = [read for read, _ in take_in(slab, inbox, *jobs)]
    assert read == [digest_of(DATA), GONE, digest_of(DATA)]


# Several threads read a group that is large or far away.


@pytest.mark.parametrize(
    ("cores", "far", "threads"), [(8, False, 2), (64, False, READERS), (1, True, NETWORK_READERS)]
)
def test_so_many_files_of_a_large_group_or_of_a_network_mount_are_read_at_once(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch, cores: int, far: bool, threads: int
) -> None:
    share_out(monkeypatch, cores, far=far, large=not far)
    together, preadv = threading.Barrier(threads), os.preadv

    def wait_for_others(fd: int, buffers: list[memoryview], offset: int) -> int:
        together.wait(PATIENCE)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", wait_for_others)
    read = take_in(slab, inbox, *drop_many(inbox, 2 * threads))
    assert read == [(digest_of(DATA), DATA)] * 2 * threads


@pytest.mark.parametrize(
    ("cores", "large", "files"),
    [(4, True, 4), (64, False, 4), (64, True, 1)],
    ids=["few cores", "a small group", "one file"],
)
def test_the_thread_that_asks_reads_by_itself_what_is_not_worth_another(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch, cores: int, large: bool, files: int
) -> None:
    share_out(monkeypatch, cores, large=large)
    monkeypatch.setattr(disk, "ThreadPoolExecutor", None)
    read = take_in(slab, inbox, *drop_many(inbox, files))
    assert read == [(digest_of(DATA), DATA)] * files


def test_a_file_for_which_several_threads_have_too_few_descriptors_is_read_by_one(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_out(monkeypatch, 64)
    jobs, really_open, asking = drop_many(inbox, 3), os.open, threading.current_thread()
    refusals = iter([errno.EMFILE])

    def refuse_another_once(path: bytes, flags: int) -> int:
        if threading.current_thread() is not asking and (number := next(refusals, 0)):
            raise OSError(number, os.strerror(number))
        return really_open(path, flags)

    monkeypatch.setattr(os, "open", refuse_another_once)
    assert [read for read, _ in take_in(slab, inbox, *jobs)] == [digest_of(DATA)] * 3
    assert not list(refusals)


def test_a_system_that_allows_no_more_threads_has_its_files_read(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    share_out(monkeypatch, 64)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    read = take_in(slab, inbox, *drop_many(inbox, 3))
    assert read == [(digest_of(DATA), DATA)] * 3


# Another version than the ledger's is never read.


def rewrite(path: Path) -> None:
    path.write_bytes(b"BYTES OF AN IMAGE")
    os.utime(path, ns=(1, 1))


def replace_by_twin(path: Path) -> None:
    status = path.stat()
    twin = path.with_name("twin")
    twin.write_bytes(b"BYTES OF AN IMAGE")
    os.utime(twin, ns=(status.st_mtime_ns, status.st_mtime_ns))
    os.rename(twin, path)


def replace_by_link(path: Path) -> None:
    os.rename(path, path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_socket(path: Path) -> None:
    path.unlink()
    os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize(
    "change",
    [
        Path.unlink,
        rewrite,
        replace_by_twin,
        replace_by_link,
        replace_by_fifo,
        replace_by_folder,
        replace_by_socket,
        lambda path: path.chmod(0o600),
        lambda path: os.truncate(path, 3),
        lambda path: os.rename(path.parent, path.parent.with_name("moved away")),
    ],
    ids=[
        "vanished",
        "rewritten",
        "twin",
        "link",
        "fifo",
        "folder",
        "socket",
        "other rights",
        "truncated",
        "folder vanished",
    ],
)
def test_a_file_that_is_another_by_now_is_gone(
    inbox: Path, slab: Slab, change: Callable[[Path], object]
) -> None:
    job = drop(inbox)
    change(inbox / "a.jpg")
    [(read, _)] = take_in(slab, inbox, job)
    assert read == GONE


def test_a_file_that_the_daemon_moved_is_the_same_when_its_permissions_are_fixed(
    inbox: Path, slab: Slab
) -> None:
    job = moved(inbox)
    os.chmod(job.location, 0o640)
    assert Version.of(os.stat(job.location)) != job.version
    assert take_in(slab, inbox, job) == [(digest_of(DATA), DATA)]


@pytest.mark.parametrize("change", [rewrite, replace_by_twin, Path.unlink])
def test_another_file_where_the_daemon_moved_one_is_not_taken_for_it(
    inbox: Path, slab: Slab, change: Callable[[Path], object]
) -> None:
    job = moved(inbox)
    change(Path(os.fsdecode(job.location)))
    [(read, _)] = take_in(slab, inbox, job)
    assert read == GONE


def test_a_link_in_place_of_a_moved_file_is_not_followed_even_to_the_same_version(
    inbox: Path, slab: Slab
) -> None:
    job = moved(inbox)
    replace_by_link(Path(os.fsdecode(job.location)))
    [(read, _)] = take_in(slab, inbox, job)
    assert read == GONE


def test_a_link_is_not_followed_even_to_the_same_version(inbox: Path, slab: Slab) -> None:
    job = drop(inbox)
    replace_by_link(inbox / "a.jpg")
    job = replace(job, version=Version.of(os.stat(inbox / "elsewhere")))
    [(read, _)] = take_in(slab, inbox, job)
    assert read == GONE


def test_a_link_in_place_of_a_folder_on_the_path_is_not_followed_even_to_the_same_version(
    inbox: Path, slab: Slab
) -> None:
    secret = inbox.parent / "secret"
    secret.mkdir()
    job = replace(drop(secret), path=b"sub/a.jpg")
    (inbox / "sub").symlink_to(secret)
    [(read, _)] = take_in(slab, inbox, job)
    assert read == GONE


def test_an_inbox_may_be_a_link_itself(inbox: Path, slab: Slab) -> None:
    link = inbox.with_name("link")
    link.symlink_to(inbox)
    job = drop(inbox)
    assert take_in(slab, link, job) == [(digest_of(DATA), DATA)]


def test_a_file_in_the_place_of_a_folder_on_the_way_is_gone(inbox: Path, slab: Slab) -> None:
    (inbox / "sub").mkdir()
    job = drop(inbox, b"sub/a.jpg")
    (inbox / "sub" / "a.jpg").unlink()
    (inbox / "sub").rmdir()
    (inbox / "sub").write_bytes(b"")
    [(read, _)] = take_in(slab, inbox, job)
    assert read == GONE


@pytest.mark.parametrize(
    "change",
    [lambda path: os.truncate(path, 4), rewrite],
    ids=["it shrinks", "it is rewritten at the same size"],
)
def test_a_file_that_changes_while_it_is_read_is_gone(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    job = drop(inbox)
    preadv = os.preadv

    def read_a_little(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(fd, [buffers[0][:4]], offset)
        if offset == 0:
            change(inbox / "a.jpg")
        return count

    monkeypatch.setattr(os, "preadv", read_a_little)
    [(read, _)] = take_in(slab, inbox, job)
    assert read == GONE


def test_a_file_that_ends_before_its_size_is_gone(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = drop(inbox)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 4 if offset == 0 else 0)
    [(read, _)] = take_in(slab, inbox, job)
    assert read == GONE


# What cannot be read at all


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_fails_for_good(inbox: Path, slab: Slab) -> None:
    job = drop(inbox)
    (inbox / "a.jpg").chmod(0)
    job = replace(job, version=Version.of(os.stat(inbox / "a.jpg")))
    [(read, _)] = take_in(slab, inbox, job)
    assert read == Read(failure=Failure(Reason.UNREADABLE, "Permission denied"))


@pytest.mark.parametrize(
    ("number", "failure"),
    [
        (errno.EACCES, Failure(Reason.UNREADABLE, "Permission denied")),
        (errno.EIO, Failure(Reason.UNREADABLE, "Input/output error", transient=True)),
        (errno.ENOMEM, Failure(Reason.UNREADABLE, "Cannot allocate memory", transient=True, away=True)),
        (errno.ETIMEDOUT, Failure(Reason.UNREADABLE, "Connection timed out", transient=True, away=True)),
    ],
)
def test_only_an_error_that_may_pass_is_worth_another_try(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch, number: int, failure: Failure
) -> None:
    job = drop(inbox)

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        [(read, _)] = take_in(slab, inbox, job)
    assert read == Read(failure=failure)


def test_an_error_of_a_whole_disk_is_no_images_fault(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = drop(inbox)

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        patch.setattr(os, "scandir", refuse)
        [(read, _)] = take_in(slab, inbox, job)
    assert read == Read(failure=Failure(Reason.UNREADABLE, "Input/output error", transient=True, away=True))


@pytest.mark.parametrize("cores", [1, 64])
def test_no_descriptor_is_left_open(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    share_out(monkeypatch, cores)
    jobs = [drop(inbox, b"whole.jpg"), drop(inbox, b"changed.jpg")]
    rewrite(inbox / "changed.jpg")
    before = os.listdir("/proc/self/fd")
    take_in(slab, inbox, *jobs)
    assert os.listdir("/proc/self/fd") == before
