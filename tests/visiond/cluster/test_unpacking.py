"""How an actor unpacks: when the disk for temporary files is full, and when other actors start meanwhile."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.config.loading import parse
from daemon.core.jobs import Failure
from daemon.unpacking.folder import Contents, NoRoom, check_room
from stages.contract.base import Reason
from tests.daemon.unpacking.containers import make_zip
from tests.daemon_process import picture
from visiond.cluster.reading import temporary, unpacking
from visiond.cluster.reading.fetching import fetch, opened_threads
from visiond.cluster.reading.inputs import ClusterInput
from visiond.cluster.reading.temporary import FOLDERS, TemporaryUnusable, held_folder, remove_leftovers
from visiond.cluster.reading.unpacking import ClusterUnpacker

IMAGES = {f"{number}.ppm": picture(number) for number in range(3)}
MEMBERS = {f"a.zip.unpacked/{name}": data for name, data in IMAGES.items()}


class Disk:
    """The one of the temporary folder, with what is really in it. others: bytes that other programs hold."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size, self.others = folder, size, 0
        self.pauses: list[float] = []
        self.held: list[int] = []  # bytes of actors, in each pause
        self.full_pauses = 0  # after so many others have made room; 0: they never do

    def measure(self, _fd: int) -> Any:
        free = max(0, self.size - self.others - self.count())
        return SimpleNamespace(f_files=0, f_favail=0, f_frsize=1, f_blocks=self.size, f_bavail=free)

    def count(self) -> int:
        return sum(file.lstat().st_blocks * 512 for file in self.folder.rglob("*") if file.is_file())

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.held.append(self.count())
        if len(self.pauses) == self.full_pauses:
            self.others = 0

    def fill(self) -> None:
        self.others = self.size


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    folder = tmp_path / "temporary"
    folder.mkdir()
    disk = Disk(folder, 64 << 20)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(os, "fstatvfs", disk.measure)
    monkeypatch.setattr(temporary, "time", SimpleNamespace(sleep=disk.sleep))
    return disk


class Object(io.BytesIO):
    """In a store. meanwhile: called when it has been read to its end."""

    def __init__(self, data: bytes, meanwhile: Callable[[], None]) -> None:
        super().__init__(data)
        self.meanwhile = meanwhile

    def read(self, size: int | None = -1) -> bytes:
        piece = super().read(size)
        if not piece:
            self.meanwhile()
        return piece


Read = Callable[..., dict[str, bytes | OSError | Failure]]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    def read(data: bytes, at: str, meanwhile: Callable[[], None] = lambda: None, **limits: int) -> Any:
        """What an actor gets of a.zip, by name. at: "file" or "object"."""
        unpacker = ClusterUnpacker(parse({"inbox": [{"unpack": ["zip"]}], "unpacking": limits}, tmp_path))
        place = str(tmp_path / "a.zip") if at == "file" else "s3://bucket/a.zip"
        (tmp_path / "a.zip").write_bytes(data)
        if at == "object":
            monkeypatch.setattr(unpacking, "open_stream", lambda _: Object(data, meanwhile))
        with opened_threads() as threads:
            found = fetch([ClusterInput(b"a.zip", place.encode())], threads, unpacker)
            return {each.name.decode(): each.data for each in found}

    return read


@pytest.mark.parametrize("at", ["file", "object"])
def test_a_disk_that_is_full_for_a_moment_is_waited_for(at: str, disk: Disk, read: Read) -> None:
    disk.fill()
    disk.full_pauses = 3
    found = read(make_zip(IMAGES), at)
    assert {name: found[name] for name in MEMBERS} == MEMBERS
    assert disk.pauses == [1, 2, 4]


def test_an_object_is_copied_again_when_others_fill_the_disk_meanwhile(
    disk: Disk, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "PIECE_BYTES", 100)
    data, seen = make_zip(IMAGES), []

    def fill_and_check(fd: int) -> None:
        seen.append(fd)
        if len(seen) == 2:
            disk.fill()
        check_room(fd)

    disk.full_pauses = 2
    monkeypatch.setattr(unpacking, "check_room", fill_and_check)
    found = read(data, "object")
    assert {name: found[name] for name in MEMBERS} == MEMBERS
    assert len(disk.pauses) == 2


@pytest.mark.parametrize(
    ("at", "is_late"), [("file", False), ("object", False), ("object", True)], ids=["file", "object", "later"]
)
def test_a_disk_that_stays_full_ends_the_run_and_fails_no_image(
    at: str, is_late: bool, disk: Disk, read: Read
) -> None:
    """is_late: it is full when the object has been copied."""
    if not is_late:
        disk.fill()
    with pytest.raises(TemporaryUnusable) as ended:
        read(make_zip(IMAGES), at, disk.fill)
    assert ended.value.exit_status == os.EX_IOERR
    for word in (str(disk.folder), "disk is nearly full", "TMPDIR", "--resume"):
        assert word in str(ended.value)
    assert sum(disk.pauses) > 60
    assert not [*disk.folder.iterdir()]


def test_what_alone_needs_more_room_than_there_is_fails_as_in_the_daemon(
    disk: Disk, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one fills the disk by its copy alone."""
    monkeypatch.setattr(unpacking, "PIECE_BYTES", 1 << 16)
    expected = f"would nearly fill the disk of {disk.folder}; make room, or set TMPDIR to another folder"
    large = read(make_zip(IMAGES, claimed_bytes=1 << 30), "file", most_bytes=1 << 40, most_ratio=10**9)
    assert large == {"a.zip": Failure(Reason.CONTAINER, f"what is in it {expected}")}
    disk.size = 1 << 20
    for size, what in ((2 << 20, "it"), (1000 << 10, "what is in it")):
        copied = read(bytes(size), "object")
        assert copied == {"a.zip": Failure(Reason.CONTAINER, f"{what} {expected}")}
    assert sum(disk.pauses) < 10


def test_what_an_attempt_has_written_is_removed_before_the_next(
    disk: Disk, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_fd: int, _kind: str, contents: Contents, *_: object) -> None:
        contents.begin(b"large")
        contents.write(bytes(1 << 20))
        contents.finish()
        assert disk.count() >= 1 << 20
        raise NoRoom(is_new=True)

    monkeypatch.setattr(unpacking, "take_apart", fill)
    assert isinstance(read(make_zip(IMAGES), "file")["a.zip"], Failure)
    assert disk.held == [0, 0]


def test_a_temporary_folder_that_cannot_be_written_to_ends_the_run(
    disk: Disk, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.folder.rmdir()
    with pytest.raises(TemporaryUnusable, match=f"in {disk.folder} on .*: No such file"):
        read(make_zip(IMAGES), "file")

    def fail() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with pytest.raises(TemporaryUnusable, match="No usable temporary directory"):
        remove_leftovers()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_an_actor_that_starts_does_not_take_the_folder_that_another_makes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts before the other has locked the folder."""
    make = tempfile.mkdtemp

    def mkdtemp(*arguments: Any, **options: Any) -> str:
        made: str = make(*arguments, **options)
        remove_leftovers()
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with held_folder() as held:
        remove_leftovers()
        assert held.is_dir()
    assert not [*folder.iterdir()]


def test_folders_of_actors_that_were_killed_are_removed(folder: Path) -> None:
    (folder / f"{FOLDERS}killed" / "inner").mkdir(parents=True)
    with held_folder() as held:
        remove_leftovers()
        assert [*folder.iterdir()] == [held]
