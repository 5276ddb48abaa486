"""What becomes of an uploaded file on the disk, and which name it gets."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from daemon.config.sections import Inbox
from daemon.server import incoming
from daemon.server.incoming import (
    HIDDEN,
    Incoming,
    NameTaken,
    Receiver,
    Upload,
    choose_suffix,
    clean,
    started_at,
)
from daemon.system.beneath import rename_to_free
from daemon.unpacking import folder
from daemon.unpacking.folder import NoRoom
from stages.contract.base import ImageError
from tests.daemon.server.client import sleeping
from tests.daemon_process import PATIENCE, picture

PNG = b"\x89PNG\r\n\x1a\n"


def open_receiver(
    folder: Path, has_taken: Callable[[bytes, str], bool] = lambda name, digest: False
) -> Receiver:
    return Receiver(Inbox(path=folder), has_taken)


def receive(receiver: Receiver, data: bytes, name: str = "a.ppm") -> Incoming:
    """A file that is here and not placed."""
    file = Incoming(name, 1 << 20, [])
    file.add(data)
    file.finish()
    return file


def commit(receiver: Receiver, *files: Incoming) -> None:
    """Each by a request of its own, all at the same time."""

    async def run() -> None:
        limiter = anyio.CapacityLimiter(len(files))
        async with anyio.create_task_group() as tasks:
            for each in files:
                tasks.start_soon(receiver.commit, [each], 0, limiter)

    anyio.run(run)


@pytest.mark.parametrize("is_large", [False, True])
def test_bytes_and_names_are_flushed_in_an_order_that_no_power_failure_can_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """The bytes before the name, and the name before the answer; of a large file as of those that are in memory."""
    calls = []
    fsync = os.fsync

    def note_fsync(fd: int) -> None:
        calls.append(("flush", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        fsync(fd)

    def note_rename(before: bytes, after: bytes, **folders: Any) -> None:
        calls.append(("rename", os.fsdecode(after)))
        rename_to_free(before, after, **folders)

    receiver = open_receiver(tmp_path)
    files = [receive(receiver, picture(number)) for number in range(2)]
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(incoming, "rename_to_free", note_rename)
    for each in files if is_large else []:
        receiver.begin(each, 0)
        each.flush()
    receiver.place([Upload([each]) for each in files])
    hidden = [name for call, name in calls[:2]]
    assert all(name.startswith(f"{os.getpid()}-") for name in hidden)
    assert calls == [
        *(("flush", name) for name in hidden),
        *(("rename", each.name) for each in files),
        ("flush", tmp_path.name),
    ]


def test_if_the_disk_is_slow_files_are_flushed_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, fsync = open_receiver(tmp_path), os.fsync
    monkeypatch.setattr(incoming, "SLOW_SECONDS", 0.0)
    receiver.place([Upload([receive(receiver, picture(0))])])
    both = threading.Barrier(2)

    def wait_for_the_other(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            both.wait(PATIENCE)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", wait_for_the_other)
    receiver.place(uploads := [Upload([receive(receiver, picture(number))]) for number in (1, 2)])
    assert [each.problem for each in uploads] == [None, None]
    assert len([*tmp_path.glob("*.ppm")]) == 3


def test_the_files_of_a_group_are_not_all_open_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 forms of 64 files would use up the descriptors."""
    receiver, fsync = open_receiver(tmp_path), os.fsync
    most, before = [0], len(os.listdir("/proc/self/fd"))

    def count(fd: int) -> None:
        most.append(len(os.listdir("/proc/self/fd")) - before)
        fsync(fd)

    monkeypatch.setattr(incoming, "SLOW_SECONDS", float(PATIENCE))  # a thread that counts opens one more
    monkeypatch.setattr(os, "fsync", count)
    files = [receive(receiver, picture(number)) for number in range(3 * incoming.FILES_AT_ONCE)]
    receiver.place([Upload(files)])
    assert max(most) <= incoming.FILES_AT_ONCE + 2  # and both folders
    assert len([*tmp_path.glob("*.ppm")]) == len(files)


def test_a_file_that_cannot_be_flushed_has_no_name_and_keeps_no_other_one_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, fsync = open_receiver(tmp_path), os.fsync
    failed: list[int] = []

    def fail_once(fd: int) -> None:
        if not failed:
            failed.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail_once)
    files = [receive(receiver, picture(number)) for number in range(2)]
    receiver.place(uploads := [Upload([each]) for each in files])
    assert isinstance(uploads[0].problem, OSError)
    assert uploads[1].problem is None
    assert [path.name for path in tmp_path.glob("*.ppm")] == [files[1].name]
    receiver.discard(files)
    assert not any((tmp_path / os.fsdecode(HIDDEN)).iterdir())


def test_a_file_that_cannot_be_placed_keeps_no_other_one_from_it(tmp_path: Path) -> None:
    receiver = open_receiver(tmp_path)
    changed, good = (receive(receiver, picture(number)) for number in range(2))
    (tmp_path / changed.name).write_bytes(b"other bytes")
    uploads = [Upload([changed]), Upload([good])]
    receiver.place(uploads)
    assert isinstance(uploads[0].problem, NameTaken)
    assert uploads[1].problem is None
    assert (tmp_path / good.name).read_bytes() == picture(1)


def test_a_file_that_gets_the_name_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def come_first(name: bytes, _digest: str) -> bool:
        (tmp_path / os.fsdecode(name)).write_bytes(b"other bytes")
        return False

    receiver = open_receiver(tmp_path, come_first)
    file = receive(receiver, picture(1))
    receiver.place([upload := Upload([file])])
    assert isinstance(upload.problem, NameTaken)
    assert (tmp_path / file.name).read_bytes() == b"other bytes"
    receiver.discard([file])


def test_a_file_that_is_there_already_is_flushed_too_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server that placed it may have been killed before it could."""
    receiver = open_receiver(tmp_path)
    commit(receiver, receive(receiver, picture(1)))
    again = receive(receiver, picture(1))
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")))
    commit(receiver, again)
    receiver.discard([again])
    assert flushed[-1] == str(tmp_path)
    assert len([*tmp_path.glob("*.ppm")]) == 1
    assert not any((tmp_path / os.fsdecode(HIDDEN)).iterdir())


def test_of_the_same_file_at_the_same_time_one_is_kept(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def wait_for_the_other(_name: bytes, _digest: str) -> bool:
        with contextlib.suppress(
            threading.BrokenBarrierError
        ):  # it does not come: one names its file at a time
            both.wait(0.5)
        return False

    receiver = open_receiver(tmp_path, wait_for_the_other)
    files = [receive(receiver, picture(1)) for _ in range(2)]
    commit(receiver, *files)
    assert sum(not each.temporary for each in files) == 1


def test_an_upload_whose_group_came_to_nothing_is_placed_all_the_same(tmp_path: Path) -> None:
    """By a bug, or too little memory, with one of them."""
    bad, good = (receive(open_receiver(tmp_path), picture(number)) for number in range(2))

    def has_taken(name: bytes, _digest: str) -> bool:
        if name == bad.name.encode():
            raise MemoryError
        return False

    receiver = open_receiver(tmp_path, has_taken)

    async def run() -> None:
        async def fail() -> None:
            with pytest.raises(MemoryError):
                await receiver.commit([bad], 0, limiter)

        limiter = anyio.CapacityLimiter(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            tasks.start_soon(receiver.commit, [good], 0, limiter)

    anyio.run(run)
    assert (tmp_path / good.name).read_bytes() == picture(1)


def test_an_upload_is_placed_though_the_first_one_of_its_group_is_cancelled(tmp_path: Path) -> None:
    receiver = open_receiver(tmp_path)
    first, other = (receive(receiver, picture(number)) for number in range(2))

    async def run() -> None:
        limiter = anyio.CapacityLimiter(1)
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                async with receiver._placing, anyio.create_task_group() as cancelled:
                    cancelled.start_soon(receiver.commit, [first], 0, limiter)
                    await anyio.wait_all_tasks_blocked()
                    tasks.start_soon(receiver.commit, [other], 0, limiter)
                    await anyio.wait_all_tasks_blocked()
                    cancelled.cancel_scope.cancel()

    anyio.run(run)
    assert [path.name for path in tmp_path.glob("*.ppm")] == [other.name]


def test_a_file_that_root_may_give_to_nobody_is_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", refuse)
    receiver = open_receiver(tmp_path)
    commit(receiver, file := receive(receiver, picture(1)))
    assert (tmp_path / file.name).exists()


def test_what_is_written_leaves_room_though_nobody_has_said_how_much_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = open_receiver(tmp_path)
    file = receive(receiver, picture(1))
    receiver.begin(file, 0)
    monkeypatch.setattr(folder, "KEPT_SHARE", 1)
    monkeypatch.setattr(folder, "ROOM_BYTES", 1 << 60)
    with pytest.raises(NoRoom):
        file.flush()
    receiver.discard([file])
    assert not any((tmp_path / os.fsdecode(HIDDEN)).iterdir())


def test_uploads_that_begin_while_others_are_cleared_away_stay(tmp_path: Path) -> None:
    receiver = open_receiver(tmp_path)
    file = receive(receiver, picture(1))
    receiver.begin(file, 0)
    (tmp_path / os.fsdecode(HIDDEN) / f"{os.getpid()}-0").touch()  # of a server in another container
    receiver.clear()
    file.flush()
    commit(receiver, file)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [file.name]
    assert not any((tmp_path / os.fsdecode(HIDDEN)).iterdir())


def test_what_a_zombie_or_a_predecessor_with_the_number_of_another_process_left_is_removed(
    tmp_path: Path,
) -> None:
    receiver, hidden = open_receiver(tmp_path), tmp_path / os.fsdecode(HIDDEN)
    hidden.mkdir()
    with sleeping() as zombie, sleeping() as another:
        started = started_at(zombie.pid), started_at(another.pid)
        zombie.kill()
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        (hidden / f"{zombie.pid}-{started[0]}-0").touch()
        (hidden / f"{another.pid}-{started[1] - 1}-0").touch()
        (hidden / f"{another.pid}-0").touch()  # of an earlier version
        written = hidden / f"{another.pid}-{started[1]}-0"
        written.touch()
        assert receiver.clear(), "another one writes"
        assert list(hidden.iterdir()) == [written]


def test_what_another_server_has_removed_meanwhile_stops_no_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, hidden = open_receiver(tmp_path), tmp_path / os.fsdecode(HIDDEN)
    hidden.mkdir()
    (hidden / "999999999-7").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda _: ["999999998-7", "999999999-7"])
        assert not receiver.clear()
    assert not any(hidden.iterdir())


def test_a_link_in_the_place_of_the_hidden_folder_is_not_followed(tmp_path: Path) -> None:
    inbox, elsewhere = tmp_path / "inbox", tmp_path / "elsewhere"
    inbox.mkdir()
    elsewhere.mkdir()
    (inbox / os.fsdecode(HIDDEN)).symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        open_receiver(inbox).begin(Incoming("a.jpg", 1 << 20, []), 0)
    assert not any(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("photo.jpg", "photo"),
        ("/etc/passwd", "passwd"),
        ("..\\..\\evil.jpg", "evil"),
        ("../..", ""),
        ("", ""),
        (".hidden.png", "hidden"),
        ("~$draft.tif", "draft"),
        ("scan.tar.gz", "scan"),
        ("a\0b\n\u202egpj.jpg", "abgpj"),
        ("Größe 1.jpg", "Größe 1"),
        ("ü" * 200, "ü" * 50),
        ("a\udcff.jpg", "a"),
        ('10:30 <a|b> "c*d?".jpg', "1030 ab cd"),
    ],
)
def test_of_a_name_that_a_program_gave_only_letters_are_kept(given: str, kept: str) -> None:
    assert clean(given) == kept


@pytest.mark.parametrize(
    ("name", "head", "suffix"),
    [
        ("a.png", b"\xff\xd8\xff", ".jpg"),
        ("", PNG, ".png"),
        ("a.tgz", b"\x1f\x8b", ".tgz"),
        ("a.tar.gz", b"\x1f\x8b", ".tar.gz"),
        ("", b"PK\3\4", ".zip"),
        ("a.cbz", b"PK\3\4", ".cbz"),
        ("film.mov", b"\0\0\0\x20ftypqt  ", ".mov"),
        ("", b"%PDF-1.7", ".pdf"),
    ],
)
def test_the_suffix_follows_from_the_first_bytes(name: str, head: bytes, suffix: str) -> None:
    assert choose_suffix(name, head, ["zip", "tar", "pdf", "video"]) == suffix


@pytest.mark.parametrize("head", [b"PK\3\4", b"%PDF-1.7", b"text", b"8BPS"])
def test_what_an_inbox_does_not_read_is_refused(head: bytes) -> None:
    with pytest.raises(ImageError):
        choose_suffix("a.jpg", head, ["tar"])
