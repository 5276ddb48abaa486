from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon.inbox.intake import read_files
from daemon.jobs import Failure, Job, Version
from daemon.workers.slab import Slab
from stages.base import Reason
from tests.makers import make_job


@pytest.fixture
def slab() -> Iterator[Slab]:
    opened = Slab(1 << 20)
    yield opened
    opened.close()


def drop(inbox: Path, path: bytes = b"a.jpg", data: bytes = b"bytes of an image") -> Job:
    """A file in the inbox, and the job of its current version."""
    location = os.path.join(os.fsencode(inbox), path)
    with open(location, "wb") as file:
        file.write(data)
    return make_job(path, version=Version.of(os.stat(location)))


def moved(inbox: Path) -> Job:
    """The job of a file that the daemon has moved to the failed folder."""
    job = drop(inbox)
    job.location = os.fsencode(inbox.parent / "failed.jpg")
    os.rename(inbox / "a.jpg", job.location)
    job.version = Version.of(os.stat(job.location))
    return job


def take_in(slab: Slab, inbox: Path, *jobs: Job) -> None:
    for job in jobs:
        job.extent = slab.try_reserve(job.version.size)
    read_files(jobs, slab, {1: os.fsencode(inbox)})


def content(slab: Slab, job: Job) -> bytes:
    assert job.extent is not None
    return bytes(slab.window(job.extent))


def test_a_files_bytes_are_in_the_slab_with_their_digest(inbox: Path, slab: Slab) -> None:
    job = drop(inbox)
    take_in(slab, inbox, job)
    assert content(slab, job) == b"bytes of an image"
    assert job.digest == hashlib.sha256(b"bytes of an image").digest()
    assert (job.gone, job.failure) == (False, None)


def test_while_no_file_can_be_opened_no_file_is_blamed(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [drop(inbox, b"a.jpg"), drop(inbox, b"b.jpg")]
    with monkeypatch.context() as patch:

        def refuse(*_arguments: object, **_options: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            take_in(slab, inbox, *jobs)
    assert not any(job.failure or job.gone for job in jobs)
    read_files(jobs, slab, {1: os.fsencode(inbox)})
    assert all(job.digest for job in jobs)


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
    read_files(jobs, slab, {1: os.fsencode(inbox)})
    assert [(bool(job.digest), job.failure, job.gone) for job in jobs] == [(True, None, False)] * 3


def test_an_empty_file_has_a_digest_too(inbox: Path, slab: Slab) -> None:
    job = drop(inbox, data=b"")
    take_in(slab, inbox, job)
    assert job.digest == hashlib.sha256().digest()


def test_a_name_need_not_be_utf8(inbox: Path, slab: Slab) -> None:
    job = drop(inbox, b"\xff\xfe\n.jpg", b"odd")
    take_in(slab, inbox, job)
    assert content(slab, job) == b"odd"


def test_a_file_the_daemon_moved_is_read_where_it_lies_now(inbox: Path, slab: Slab) -> None:
    job = moved(inbox)
    take_in(slab, inbox, job)
    assert content(slab, job) == b"bytes of an image"


def test_a_file_that_cannot_be_read_affects_no_other_file_of_its_group(inbox: Path, slab: Slab) -> None:
    jobs = [drop(inbox, name) for name in (b"1.jpg", b"2.jpg", b"3.jpg")]
    os.unlink(inbox / "2.jpg")
    take_in(slab, inbox, *jobs)
    assert [bool(job.digest) for job in jobs] == [True, False, True]
    assert [job.gone for job in jobs] == [False, True, False]


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
    take_in(slab, inbox, job)
    assert job.gone
    assert (job.digest, job.failure) == (b"", None)


def test_a_file_that_the_daemon_moved_is_the_same_when_its_permissions_are_fixed(
    inbox: Path, slab: Slab
) -> None:
    job = moved(inbox)
    os.chmod(job.location, 0o640)
    assert Version.of(os.stat(job.location)) != job.version
    take_in(slab, inbox, job)
    assert (content(slab, job), job.gone) == (b"bytes of an image", False)


@pytest.mark.parametrize("change", [rewrite, replace_by_twin, Path.unlink])
def test_another_file_where_the_daemon_moved_one_is_not_taken_for_it(
    inbox: Path, slab: Slab, change: Callable[[Path], object]
) -> None:
    job = moved(inbox)
    change(Path(os.fsdecode(job.location)))
    take_in(slab, inbox, job)
    assert (job.gone, job.digest) == (True, b"")


def test_a_link_in_place_of_a_moved_file_is_not_followed_even_to_the_same_version(
    inbox: Path, slab: Slab
) -> None:
    job = moved(inbox)
    replace_by_link(Path(os.fsdecode(job.location)))
    take_in(slab, inbox, job)
    assert (job.gone, job.digest) == (True, b"")


def test_a_link_is_not_followed_even_to_the_same_version(inbox: Path, slab: Slab) -> None:
    job = drop(inbox)
    replace_by_link(inbox / "a.jpg")
    job.version = Version.of(os.stat(inbox / "elsewhere"))
    take_in(slab, inbox, job)
    assert job.gone
    assert job.digest == b""


def test_a_link_in_place_of_a_folder_on_the_path_is_not_followed_even_to_the_same_version(
    inbox: Path, slab: Slab
) -> None:
    secret = inbox.parent / "secret"
    secret.mkdir()
    job = drop(secret)
    job.path = b"sub/a.jpg"
    (inbox / "sub").symlink_to(secret)
    take_in(slab, inbox, job)
    assert job.gone
    assert job.digest == b""


def test_an_inbox_may_be_a_link_itself(inbox: Path, slab: Slab) -> None:
    link = inbox.with_name("link")
    link.symlink_to(inbox)
    job = drop(inbox)
    take_in(slab, link, job)
    assert content(slab, job) == b"bytes of an image"


def test_a_file_in_the_place_of_a_folder_on_the_way_is_gone(inbox: Path, slab: Slab) -> None:
    (inbox / "sub").mkdir()
    job = drop(inbox, b"sub/a.jpg")
    (inbox / "sub" / "a.jpg").unlink()
    (inbox / "sub").rmdir()
    (inbox / "sub").write_bytes(b"")
    take_in(slab, inbox, job)
    assert job.gone


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
    take_in(slab, inbox, job)
    assert job.gone
    assert job.digest == b""


def test_a_file_that_ends_before_its_size_is_gone(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = drop(inbox)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 4 if offset == 0 else 0)
    take_in(slab, inbox, job)
    assert job.gone
    assert job.digest == b""


# What cannot be read at all


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_fails_for_good(inbox: Path, slab: Slab) -> None:
    job = drop(inbox)
    (inbox / "a.jpg").chmod(0)
    job.version = Version.of(os.stat(inbox / "a.jpg"))
    take_in(slab, inbox, job)
    assert job.failure == Failure(Reason.UNREADABLE, "Permission denied")


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
        take_in(slab, inbox, job)
    assert job.failure == failure
    assert not job.gone


def test_an_error_of_a_whole_disk_is_no_images_fault(
    inbox: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = drop(inbox)

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        patch.setattr(os, "scandir", refuse)
        take_in(slab, inbox, job)
    assert job.failure == Failure(Reason.UNREADABLE, "Input/output error", transient=True, away=True)


def test_no_descriptor_is_left_open(inbox: Path, slab: Slab) -> None:
    jobs = [drop(inbox, b"whole.jpg"), drop(inbox, b"changed.jpg")]
    rewrite(inbox / "changed.jpg")
    before = os.listdir("/proc/self/fd")
    take_in(slab, inbox, *jobs)
    assert os.listdir("/proc/self/fd") == before
