"""Uploads that pause: a file that is being written does not FAIL and is not moved, and what changes after it FAILED is
processed again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from PIL import Image

from daemon.core.jobs import Ending, Failure, JobStatus, Version
from daemon.inbox import sources
from daemon.inbox.sources import WRITTEN, find_changed, is_still_written
from daemon.results.destinations import Held
from daemon.results.judge import Judge
from daemon.system.beneath import rename_to_free
from stages.contract.base import Reason
from stages.contract.binning import Thresholds
from tests.daemon_process import Daemon, Place
from tests.makers import drop, make_job, open_destination


def has_leases(folder: Path) -> bool:
    file = folder / "lease"
    file.write_bytes(b"")
    with file.open("rb") as opened:
        try:
            fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            return False
    return True


@pytest.fixture(autouse=True)
def leases(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not has_leases(tmp_path_factory.mktemp("leases")):
        pytest.skip("the file system of the tests has no leases")


def open_now(path: str, flags: int) -> int:
    """Raises BlockingIOError if somebody has a lease."""
    return os.open(path, flags | os.O_NONBLOCK)


def jpeg(folder: Path) -> bytes:
    Image.effect_noise((64, 48), 50.0).save(folder / "noise.jpg")
    return (folder / "noise.jpg").read_bytes()


# A file that is being written does not FAIL


@pytest.mark.parametrize("mode", ["r+b", "ab"])
def test_a_file_is_being_written_while_somebody_has_it_open_for_writing(tmp_path: Path, mode: str) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(b"half")
    assert not is_still_written(bytes(file), 2e9)  # seen in the future: the clock was set back
    with file.open("rb"):
        assert not is_still_written(bytes(file), os.stat(file).st_mtime)
    with file.open(mode):
        assert is_still_written(bytes(file), os.stat(file).st_mtime)
        assert not is_still_written(bytes(file), os.stat(file).st_mtime - 601.0)
    assert not is_still_written(bytes(tmp_path / "gone.jpg"), os.stat(file).st_mtime)


@pytest.mark.parametrize(
    "reason", [Reason.TRUNCATED, Reason.HEADER, Reason.DECODER, Reason.EMPTY, Reason.NOT_AN_IMAGE]
)
def test_what_the_bytes_say_is_doubtful_and_what_a_stage_says_is_not(reason: Reason) -> None:
    def is_doubtful(reason: Reason, status: JobStatus) -> bool:
        return Ending(make_job(), status, 2e9, 1, failure=Failure(reason, "")).is_doubtful

    assert is_doubtful(reason, JobStatus.FAILED)
    assert is_doubtful(reason, JobStatus.SKIPPED)
    assert not is_doubtful(reason, JobStatus.PENDING)
    assert not is_doubtful(Reason.STAGE, JobStatus.FAILED)


def test_the_longer_a_file_is_open_the_longer_it_waits_and_no_attempt_is_counted() -> None:
    judge = Judge(Thresholds(), retry_seconds=5.0, steady=lambda: 0.0)
    failure = Failure(Reason.TRUNCATED, "", written=True)
    endings = [judge.failed(make_job(seen_at=0.0, attempts=2), failure, now) for now in (1.0, 20.0, 1e5)]
    assert [ending.not_before for ending in endings] == [5.0, 20.0, 600.0]
    assert {(ending.status, ending.attempts) for ending in endings} == {(JobStatus.PENDING, 2)}


# Nothing is moved while it is being written


@pytest.mark.parametrize(("bins", "fate"), [("none", "move"), ("none", "delete"), ("move", "keep")])
def test_a_file_that_somebody_writes_to_leaves_when_it_is_closed(
    tmp_path: Path, bins: str, fate: str
) -> None:
    destination, record = open_destination(tmp_path, bins, fate), drop(tmp_path)
    source = tmp_path / "inbox" / "a.jpg"
    with source.open("r+b"):
        with pytest.raises(Held, match=WRITTEN):
            destination.publish(record, set())
        assert [file.name for file in source.parent.iterdir()] == ["a.jpg"]
        assert (tmp_path / "results" / "a.jpg.json").exists()
    destination.publish(record, set())
    assert not source.exists()


@contextlib.contextmanager
def opened_while_moved(
    source: Path, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """The source is opened for writing just before it leaves its inbox. then: what happens just after."""

    def rename_late(old: bytes, new: bytes, **folders: int) -> None:
        leaves = "src_dir_fd" in folders
        if leaves:
            opened.callback(os.close, open_now(os.fspath(source), os.O_WRONLY))
        rename_to_free(old, new, **folders)
        if leaves:
            then()

    with contextlib.ExitStack() as opened, monkeypatch.context() as patch:
        patch.setattr(sources, "rename_to_free", rename_late)
        yield


def test_a_new_file_that_gets_the_name_meanwhile_is_not_replaced_by_what_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination, record = open_destination(tmp_path, on_success="move"), drop(tmp_path)
    source = tmp_path / "inbox" / "a.jpg"
    with opened_while_moved(source, monkeypatch, lambda: source.write_bytes(b"a new upload")):
        destination.publish(record, set())
    assert source.read_bytes() == b"a new upload"
    assert (tmp_path / "done" / "a.jpg").read_bytes() == b"image"


def test_a_file_that_is_opened_for_writing_while_it_is_moved_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination, record = open_destination(tmp_path, on_success="move"), drop(tmp_path)
    source = tmp_path / "inbox" / "a.jpg"
    with opened_while_moved(source, monkeypatch), pytest.raises(Held, match=WRITTEN):
        destination.publish(record, set())
    assert source.read_bytes() == b"image"
    assert not list((tmp_path / "done").iterdir())


def test_whoever_opens_a_file_while_that_is_asked_neither_waits_nor_ends_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the signal that comes with a lease ends the process."""
    caught: list[int] = []
    before = signal.signal(signal.SIGIO, lambda number, frame: caught.append(number))
    file, ask, refused = tmp_path / "a.jpg", fcntl.fcntl, []
    file.write_bytes(b"half")

    def open_too(fd: int, command: int, argument: int) -> int:
        answer = ask(fd, command, argument)
        if argument == fcntl.F_RDLCK:
            with pytest.raises(BlockingIOError):
                open_now(os.fspath(file), os.O_WRONLY)
            refused.append(file)
        return answer

    monkeypatch.setattr(fcntl, "fcntl", open_too)
    try:
        assert not is_still_written(bytes(file), os.stat(file).st_mtime)
    finally:
        signal.signal(signal.SIGIO, before)
    assert (refused, caught) == ([file], [])
    with file.open("r+b"):  # does not wait
        pass


@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL, errno.ENOLCK])
def test_where_the_system_does_not_say_who_writes_a_file_leaves_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A file of another user, or on a file system without leases."""

    def refuse(fd: int, command: int, argument: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    open_destination(tmp_path, on_success="move").publish(drop(tmp_path), set())
    assert (tmp_path / "done" / "a.jpg").read_bytes() == b"image"


# What changes after it FAILED


def test_only_a_moved_file_that_was_written_to_and_closed_has_changed(tmp_path: Path) -> None:
    files = {}
    for number, name in enumerate(("same", "longer", "other", "open")):
        (tmp_path / name).write_bytes(b"half")
        files[number] = (number, bytes(tmp_path / name), Version.of(os.stat(tmp_path / name)))
    (tmp_path / "longer").write_bytes(b"half and half")
    (tmp_path / "new").write_bytes(b"half and half")
    (tmp_path / "new").rename(tmp_path / "other")
    with (tmp_path / "open").open("ab", buffering=0) as file, pytest.MonkeyPatch.context() as patch:
        file.write(b" and half")
        assert find_changed(list(files.values())) == {}  # a moment ago
        patch.setattr(sources, "QUIET_SECONDS", 0.0)
        assert find_changed(list(files.values())) == {1: Version.of(os.stat(tmp_path / "longer"))}


# A daemon at work


def write_half(folder: Path, data: bytes) -> BinaryIO:
    upload = (folder / "a.jpg").open("wb", buffering=0)
    upload.write(data[: len(data) // 2])
    return upload


def reserve_name(folder: Path, data: bytes) -> BinaryIO:
    return (folder / "a.jpg").open("wb", buffering=0)


def reserve_room(folder: Path, data: bytes) -> BinaryIO:
    """As a download in parts does: all of the file is there, and zeros."""
    upload = (folder / "a.jpg").open("wb", buffering=0)
    upload.truncate(len(data))
    return upload


def rename_half(folder: Path, data: bytes) -> BinaryIO:
    """A file that is renamed is taken at once."""
    upload = (folder / ".a.jpg.Kx81fZ").open("wb", buffering=0)
    upload.write(data[: len(data) // 2])
    (folder / ".a.jpg.Kx81fZ").rename(folder / "a.jpg")
    return upload


@pytest.mark.parametrize(
    ("begin", "on_success"),
    [
        (write_half, "move"),
        (write_half, "delete"),
        (write_half, "keep"),
        (reserve_name, "move"),
        (reserve_room, "move"),
        (rename_half, "move"),
    ],
)
def test_an_upload_that_pauses_is_done_when_it_is_complete(
    tmp_path: Path, begin: Callable[[Path, bytes], BinaryIO], on_success: str
) -> None:
    place = Place(tmp_path, {"inbox": [{"settle_seconds": 0.05, "on_success": on_success}]})
    data = jpeg(tmp_path)
    with Daemon(place) as daemon:
        with begin(place.inbox(), data) as upload:
            daemon.wait_event("image not done", outcome="PENDING")
            assert (place.inbox() / "a.jpg").exists()
            upload.seek(0)
            upload.write(data)
        daemon.wait_until(lambda status: status["done"] == 1, "the whole image")
        assert daemon.status()["failed"] == 0
        assert daemon.stop() == 0
    assert not list(place.site.failed.rglob("*"))


def test_an_archive_is_not_unpacked_while_somebody_writes_to_it(tmp_path: Path) -> None:
    place = Place(tmp_path, {"inbox": [{"settle_seconds": 0.05, "unpack": ["zip"], "on_success": "move"}]})
    with zipfile.ZipFile(tmp_path / "whole.zip", "w") as archive:
        archive.writestr("a.jpg", jpeg(tmp_path))
    data = (tmp_path / "whole.zip").read_bytes()
    with Daemon(place) as daemon:
        with (place.inbox() / "a.zip").open("wb", buffering=0) as upload:
            upload.write(data[: len(data) // 2])
            daemon.wait_event("image not done", reason="container", detail=WRITTEN)
            upload.write(data[len(data) // 2 :])
        daemon.wait_until(lambda status: status["done"] == 1, "the image in it")
        assert daemon.status()["failed"] == 0
        assert daemon.stop() == 0


def test_a_writer_that_never_closes_is_named_and_blocks_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path, {"inbox": [{"settle_seconds": 0.05, "on_success": "move"}]})
    with Daemon(place) as daemon, (place.inbox() / "a.jpg").open("wb", buffering=0) as upload:
        upload.write(jpeg(tmp_path))
        status = daemon.wait_until(
            lambda status: status["obstacles"] and status["done"], "an image that cannot leave"
        )
        assert status["obstacles"] == [f"an image cannot leave its inbox: {place.inbox()}/a.jpg: {WRITTEN}"]
        code, ready = daemon.get("/readyz")
        assert (code, ready["warnings"]) == (200, status["obstacles"])
        assert (status["done"], (place.inbox() / "a.jpg").exists()) == (1, True)
        daemon.kill()


def test_a_half_that_was_moved_and_is_completed_there_is_looked_at_again(tmp_path: Path) -> None:
    """As by a writer on another machine, of whom nothing is known here."""
    place = Place(tmp_path, {"inbox": [{"settle_seconds": 0.05, "on_success": "move"}]})
    data = jpeg(tmp_path)
    (place.inbox() / "a.jpg").write_bytes(data[: len(data) // 2])
    assert place.run_once().returncode == 1
    half = place.site.failed / "a.jpg"
    with half.open("ab") as file:
        file.write(data[len(data) // 2 :])
    os.utime(half, ns=(10**18, 10**18))
    with Daemon(place) as daemon:
        daemon.wait_until(lambda status: (status["done"], status["failed"]) == (1, 0), "the whole image")
        assert daemon.stop() == 0
    assert (place.site.done / "a.jpg").read_bytes() == data
    assert not list(place.site.failed.iterdir())
