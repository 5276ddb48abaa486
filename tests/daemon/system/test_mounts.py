from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from daemon.system import mounts
from daemon.system.mounts import (
    NETWORK_FILE_SYSTEMS,
    KnownFolder,
    Mount,
    Position,
    describe_obstacle,
    is_network_mount,
)


def test_the_kinds_of_file_system_that_send_no_events_are_known() -> None:
    assert NETWORK_FILE_SYSTEMS.fullmatch(b"nfs4")
    assert NETWORK_FILE_SYSTEMS.fullmatch(b"fuse.sshfs")
    assert not NETWORK_FILE_SYSTEMS.fullmatch(b"ext4")
    assert not is_network_mount(Path("/proc"))


def test_a_name_that_a_disk_refuses_is_named_as_what_is_in_the_way(tmp_path: Path) -> None:
    """As exFAT and SMB refuse a colon."""
    refused = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    why = describe_obstacle(refused, b"/in/10:30.jpg", bytes(tmp_path / "10:30.jpg"))
    assert why == f"the disk of {tmp_path} refuses its name; rename the file"


def test_a_mount_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a carriage return, anywhere on the machine, would end the daemon otherwise."""
    line = b"36 35 98:0 / /mnt/a\r\x0b\\040b rw,noatime master:1 - ext4 /dev/root rw\n"
    monkeypatch.setattr(Path, "read_bytes", lambda path: 2 * line)
    assert mounts.list_mounts() == 2 * [Mount(b"/mnt/a\r\x0b b", b"ext4", b"98:0", b"/")]


@pytest.mark.parametrize(("kind", "is_shared"), [(b"nfs4", False), (b"ext4", True)])
def test_mounts_of_one_file_system_of_a_network_are_told_apart_by_their_folders_alone(
    kind: bytes, is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS says "/" for every folder of a server that is mounted."""
    folders = [tmp_path / name for name in ("in", "out")]
    for folder in folders:
        folder.mkdir()
    found = [Mount(os.fsencode(folder), kind, b"0:52", b"/") for folder in folders]
    monkeypatch.setattr(mounts, "list_mounts", lambda: found)
    one, other = map(Position.of, folders)
    assert one.is_within(other) == is_shared


def test_a_folder_of_an_image_of_a_container_is_the_same_after_the_first_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """overlayfs then copies it: the inode stays, and it is born again."""
    found = [Mount(os.fsencode(tmp_path), b"overlay", b"0:52", b"/")]
    monkeypatch.setattr(mounts, "list_mounts", lambda: found)
    folder = KnownFolder(os.fsencode(tmp_path))
    folder.check()
    of = mounts.FolderIdentity.of
    monkeypatch.setattr(mounts.FolderIdentity, "of", lambda path: of(path)._replace(born=1))
    folder.check()


def test_a_folder_that_is_made_while_several_threads_look_at_it_is_not_away(tmp_path: Path) -> None:
    """As the first results of a new daemon."""
    for number in range(200):
        path = tmp_path / str(number) / "results"
        folder, start = KnownFolder(bytes(path)), threading.Barrier(5)
        folder.check()

        def look(folder: KnownFolder = folder, start: threading.Barrier = start) -> None:
            start.wait()
            for _ in range(5):
                folder.check()

        with ThreadPoolExecutor(4) as threads:
            looks = [threads.submit(look) for _ in range(4)]
            start.wait()
            path.mkdir(parents=True)
            for each in looks:
                each.result()
