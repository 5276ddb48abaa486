"""Moving, copying and deleting sources: no file of the user is lost,
and no other version is moved or deleted."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.core.files import temporary_name
from daemon.core.jobs import JobStatus, Placed, Version
from daemon.inbox import sources
from daemon.inbox.sources import _is_copy
from daemon.ledger.record import Record
from daemon.results.destinations import Held
from daemon.system.beneath import rename_to_free
from tests.makers import MODES, drop, open_destination, tree


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than tmp_path."""
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is only one file system here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


# Moving, copying, deleting


def test_a_file_of_the_same_name_in_done_is_never_overwritten(tmp_path: Path) -> None:
    destination = open_destination(tmp_path, on_success="move")
    for number in (1, 2, 3):
        destination.publish(drop(tmp_path, data=b"image %d" % number, id=number), set())
    done = {name: data for name, data in tree(tmp_path).items() if name.startswith("done/")}
    assert done == {"done/a.jpg": b"image 1", "done/a~2.jpg": b"image 2", "done/a~3.jpg": b"image 3"}


def test_a_file_that_has_the_second_name_too_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "done").mkdir()
    for name in ("a.jpg", "a~7.jpg"):
        (tmp_path / "done" / name).write_bytes(b"another image")
    open_destination(tmp_path, on_success="move").publish(drop(tmp_path), set())
    assert sorted(file.read_bytes() for file in (tmp_path / "done").iterdir()) == [b"another image"] * 2 + [
        b"image"
    ]


@pytest.mark.parametrize("status", [JobStatus.DONE, JobStatus.FAILED])
@pytest.mark.parametrize("thing", ["file", "link to nowhere", "link to itself"])
def test_a_source_that_cannot_be_moved_stays_until_what_is_in_the_way_is_gone(
    tmp_path: Path, thing: str, status: JobStatus
) -> None:
    fields: dict[str, Any] = (
        {} if status is JobStatus.DONE else {"outputs": {}, "models": [], "bin": "", "reason": "empty"}
    )
    record = drop(tmp_path, b"sub/deep/a.jpg", status=status, **fields)
    destination = open_destination(tmp_path, on_success="move")
    top = tmp_path / ("done" if status is JobStatus.DONE else "failed")
    top.mkdir()
    if thing == "file":
        (top / "sub").write_bytes(b"no folder")
    else:
        (top / "sub").symlink_to("sub" if thing == "link to itself" else "nowhere")
    with pytest.raises(Held, match=f"{top}/sub is a {thing.split()[0]}"):
        destination.publish(record, set())
    assert (tmp_path / "inbox" / "sub" / "deep" / "a.jpg").read_bytes() == b"image"
    (top / "sub").unlink()
    assert destination.publish(record, set()).location == os.fsencode(top / "sub" / "deep" / "a.jpg")


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EMFILE])
@pytest.mark.parametrize(
    ("bins", "fate"), [("none", "move"), ("none", "delete"), ("copy", "delete"), ("move", "keep")]
)
def test_a_source_is_moved_or_deleted_later_where_a_disk_fails_or_descriptors_are_lacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, bins: str, fate: str
) -> None:
    def fail(path: object, flags: int, **_: object) -> int:
        raise OSError(number, os.strerror(number))

    destination, record = open_destination(tmp_path, bins, fate), drop(tmp_path)
    with monkeypatch.context() as failing:
        failing.setattr("daemon.inbox.sources.open_beneath", fail)
        with pytest.raises(OSError if number == errno.EMFILE else Held, match=os.strerror(number)):
            destination.publish(record, set())
    assert (tmp_path / "inbox" / "a.jpg").exists()
    assert (tmp_path / "results" / "a.jpg.json").exists()
    destination.publish(record, set())
    assert not (tmp_path / "inbox" / "a.jpg").exists()


def test_a_source_in_a_failed_folder_that_is_a_link_comes_home_too(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "failed").symlink_to(tmp_path / "disk")
    record = drop(tmp_path)
    failed = tmp_path / "failed" / "a.jpg"
    Path(os.fsdecode(record.location)).rename(failed)
    again = dataclasses.replace(record, location=os.fsencode(failed), version=Version.of(failed.stat()))
    assert open_destination(tmp_path, on_success="move").publish(again, set()).location == os.fsencode(
        tmp_path / "done" / "a.jpg"
    )


def test_a_source_that_cannot_be_deleted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = drop(tmp_path)

    def refuse(old: bytes, new: bytes, **folders: int) -> None:
        if old == b"a.jpg":
            raise PermissionError(13, "Permission denied")
        rename_to_free(old, new, **folders)

    monkeypatch.setattr(sources, "rename_to_free", refuse)
    with pytest.raises(Held, match="an image cannot leave its inbox"):
        open_destination(tmp_path, on_success="delete").publish(record, set())
    assert (tmp_path / "inbox" / "a.jpg").exists()


@pytest.mark.parametrize(("bins", "folder"), [("none", "done"), ("move", "bins")])
def test_a_source_moves_across_file_systems(tmp_path: Path, elsewhere: Path, bins: str, folder: str) -> None:
    output = {"done": str(elsewhere / "done"), "bins_folder": str(elsewhere / "bins")}
    destination = open_destination(tmp_path, bins, "move" if bins == "none" else "keep", **output)
    record = drop(tmp_path)
    placed = destination.publish(record, set())
    assert placed.location == os.path.join(
        destination.done if bins == "none" else os.path.join(destination.bins, b"A"), b"a.jpg"
    )
    assert placed.version == Version.of(os.stat(placed.location))
    assert placed.version.mtime_ns == record.version.mtime_ns
    assert list(tree(elsewhere).values()) == [b"image"]
    assert list(tree(tmp_path)) == ["results/a.jpg.json"]
    assert folder in os.listdir(elsewhere)


def test_a_file_that_gets_the_name_as_a_source_leaves_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination, record = open_destination(tmp_path, on_success="move"), drop(tmp_path)

    def come_first(old: bytes, new: bytes, **folders: int) -> None:
        (tmp_path / "done" / "a.jpg").write_bytes(b"another image")
        rename_to_free(old, new, **folders)

    with monkeypatch.context() as patch:
        patch.setattr(sources, "rename_to_free", come_first)
        with pytest.raises(Held, match="File exists"):
            destination.publish(record, set())
    destination.publish(record, set())
    assert sorted(path.read_bytes() for path in (tmp_path / "done").iterdir()) == [b"another image", b"image"]


def test_a_file_that_gets_the_name_while_a_source_is_copied_is_not_overwritten(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may take seconds."""
    destination, record = open_destination(tmp_path, on_success="move", done=str(elsewhere)), drop(tmp_path)
    copyfileobj = shutil.copyfileobj

    def come_first(*arguments: Any) -> None:
        (elsewhere / "a.jpg").write_bytes(b"another image")
        copyfileobj(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", come_first)
        with pytest.raises(Held, match="File exists"):
            destination.publish(record, set())
    destination.publish(record, set())
    assert sorted(tree(elsewhere).values()) == [b"another image", b"image"]
    assert list(tree(tmp_path)) == ["results/a.jpg.json"]


def test_a_source_goes_once_its_copy_is_on_the_disk(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination, record, calls = (
        open_destination(tmp_path, on_success="move", done=str(elsewhere)),
        drop(tmp_path),
        list[str](),
    )

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(os, "fsync", noted("fsync", os.fsync))
    monkeypatch.setattr(sources, "rename_to_free", noted("rename", rename_to_free))
    sources.move(record, os.path.join(destination.done, b"a.jpg"))
    # A source that cannot be renamed is copied. The copy and its
    # name are on the disk before the source is renamed to delete it.
    assert calls == ["rename", "fsync", "rename", "fsync", "rename"]


def test_a_move_to_where_times_are_kept_in_seconds_loses_nothing(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    utime = os.utime
    monkeypatch.setattr(
        os, "utime", lambda file, ns: utime(file, ns=tuple(time - time % 2_000_000_000 for time in ns))
    )
    open_destination(tmp_path, on_success="move", done=str(elsewhere)).publish(drop(tmp_path), set())
    assert tree(elsewhere) == {"a.jpg": b"image"}
    assert list(tree(tmp_path)) == ["results/a.jpg.json"]


def test_a_source_is_moved_later_to_a_disk_that_is_full(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination, record = open_destination(tmp_path, on_success="move", done=str(elsewhere)), drop(tmp_path)

    def fill_up(source: Any, target: Any, length: int) -> None:
        target.write(source.read(2))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", fill_up)
        with pytest.raises(Held, match="No space left"):
            destination.publish(record, set())
    assert tree(elsewhere) == {}
    assert destination.publish(record, set()).location == os.path.join(destination.done, b"a.jpg")


def test_a_link_or_a_fifo_with_the_temporary_name_of_a_copy_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "diary").write_text("precious")
    destination, record = open_destination(tmp_path, "copy"), drop(tmp_path)
    copied = tmp_path / "bins" / "A" / "a.jpg"
    copied.parent.mkdir(parents=True)
    temporary = os.fsdecode(temporary_name(os.fsencode(copied)))
    for leave in (partial(os.symlink, tmp_path / "diary"), os.mkfifo):
        leave(temporary)
        destination.publish(record, set())
        assert copied.read_bytes() == b"image"
        assert not copied.is_symlink()
    assert (tmp_path / "diary").read_text() == "precious"


def test_a_copy_has_the_sources_times(tmp_path: Path) -> None:
    record = drop(tmp_path)
    open_destination(tmp_path, bins="copy").publish(record, set())
    assert (tmp_path / "bins" / "A" / "a.jpg").stat().st_mtime_ns == record.version.mtime_ns


@pytest.mark.parametrize(("mode", "kept"), [(0o640, 0o640), (0o6755, 0o755)])
def test_a_copy_has_the_permissions_of_its_source_without_set_user_id(
    tmp_path: Path, mode: int, kept: int
) -> None:
    record = drop(tmp_path)
    os.chmod(record.location, mode)
    record = dataclasses.replace(record, version=Version.of(os.stat(record.location)))
    open_destination(tmp_path, "copy").publish(record, set())
    assert stat.S_IMODE((tmp_path / "bins" / "A" / "a.jpg").stat().st_mode) == kept


# Another version has replaced the source


def test_a_source_that_is_written_to_while_it_is_copied_is_not_taken_for_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, target = drop(tmp_path), tmp_path / "bins" / "a.jpg"
    copied = shutil.copyfileobj

    def write_meanwhile(source: Any, taken: Any, length: int) -> None:
        copied(source, taken, length)
        assert not target.exists(), "it has its name only once it is whole"
        Path(os.fsdecode(record.location)).write_bytes(b"IMAGE")

    monkeypatch.setattr(shutil, "copyfileobj", write_meanwhile)
    with pytest.raises(OSError, match="another file has replaced it"):
        sources.copy(record, os.fsencode(target))
    assert tree(tmp_path) == {"inbox/a.jpg": b"IMAGE"}


def test_a_file_that_replaces_the_source_while_it_is_opened_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, opened = drop_beside_a_newer(tmp_path), os.open

    def replace_first(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if path == record.location:
            os.replace(tmp_path / "newer", record.location)
        return opened(path, flags, *arguments, **options)

    read = list[object]()
    monkeypatch.setattr(os, "open", replace_first)
    monkeypatch.setattr(shutil, "copyfileobj", lambda *given: read.append(given))
    with pytest.raises(OSError, match="another file has replaced it"):
        sources.copy(record, os.fsencode(tmp_path / "bins" / "a.jpg"))
    assert read == []
    assert tree(tmp_path) == {"inbox/a.jpg": b"IMAGE"}


@pytest.mark.parametrize(("bins", "on_success"), [*MODES, ("none", "delete"), ("copy", "delete")])
def test_a_newer_version_is_not_moved_copied_or_deleted(tmp_path: Path, bins: str, on_success: str) -> None:
    (tmp_path / "bins").mkdir()
    record = drop(tmp_path)
    drop(tmp_path, data=b"newer image")
    assert open_destination(tmp_path, bins, on_success).publish(record, set()) == Placed(record.id)
    files = tree(tmp_path)
    assert files.pop("inbox/a.jpg") == b"newer image"
    assert files.pop("results/a.jpg.json") == record.sidecar
    assert set(files.values()) <= {b"-> inbox/a.jpg"}


@pytest.mark.parametrize(("bins", "on_success"), [("none", "move"), ("move", "keep"), ("none", "delete")])
def test_a_newer_version_that_slips_in_at_the_last_moment_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bins: str, on_success: str
) -> None:
    destination, record = open_destination(tmp_path, bins, on_success), drop(tmp_path)

    def rename_too_late(old: bytes, new: bytes, **folders: int) -> None:
        if old == b"a.jpg":
            Path(os.fsdecode(record.location)).write_bytes(b"newer image")
        rename_to_free(old, new, **folders)

    with monkeypatch.context() as patch, contextlib.suppress(OSError):
        patch.setattr(sources, "rename_to_free", rename_too_late)
        destination.publish(record, set())
    assert destination.publish(record, set()) == Placed(record.id)
    assert tree(tmp_path) == {"inbox/a.jpg": b"newer image", "results/a.jpg.json": record.sidecar}


def drop_beside_a_newer(root: Path) -> Record:
    """And a file `newer` with the same size and time."""
    record = drop(root, data=b"image")
    (root / "newer").write_bytes(b"IMAGE")
    os.utime(root / "newer", ns=(record.version.mtime_ns,) * 2)
    return record


@pytest.mark.parametrize("on_success", ["delete", "move"])
def test_a_newer_version_of_the_same_size_and_time_stays(tmp_path: Path, on_success: str) -> None:
    record = drop_beside_a_newer(tmp_path)
    os.rename(tmp_path / "newer", tmp_path / "inbox" / "a.jpg")
    open_destination(tmp_path, on_success=on_success).publish(record, set())
    assert (tmp_path / "inbox" / "a.jpg").read_bytes() == b"IMAGE"


@pytest.mark.parametrize("on_success", ["delete", "move"])
def test_a_newer_version_of_the_same_size_and_time_goes_back_even_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_success: str
) -> None:
    record = drop_beside_a_newer(tmp_path)

    def rename_too_late(old: bytes, new: bytes, **folders: int) -> None:
        if (tmp_path / "newer").exists() and old == b"a.jpg":
            os.rename(tmp_path / "newer", record.location)
        rename_to_free(old, new, **folders)

    monkeypatch.setattr(sources, "rename_to_free", rename_too_late)
    open_destination(tmp_path, on_success=on_success).publish(record, set())
    assert (tmp_path / "inbox" / "a.jpg").read_bytes() == b"IMAGE"


@pytest.mark.parametrize("on_success", ["delete", "move"])
def test_a_link_that_replaces_a_folder_at_the_last_moment_loses_no_file_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_success: str
) -> None:
    destination, record = open_destination(tmp_path, on_success=on_success), drop(tmp_path, b"sub/a.jpg")
    folder, other = tmp_path / "inbox" / "sub", tmp_path / "other"
    shutil.copytree(folder, other)  # a file of the same name, size and time

    def exchange(old: bytes, new: bytes, **folders: int) -> None:
        if os.path.basename(old) == b"a.jpg":
            os.rename(folder, tmp_path / "aside")
            folder.symlink_to(other)
        rename_to_free(old, new, **folders)

    monkeypatch.setattr(sources, "rename_to_free", exchange)
    destination.publish(record, set())
    assert (other / "a.jpg").read_bytes() == b"image"
    assert not (tmp_path / "aside" / "a.jpg").exists()


@pytest.mark.parametrize(("bins", "on_success"), [*MODES, ("none", "delete"), ("copy", "delete")])
def test_a_source_that_vanished_still_gets_its_result(tmp_path: Path, bins: str, on_success: str) -> None:
    (tmp_path / "bins").mkdir()
    record = drop(tmp_path)
    os.unlink(record.location)
    assert open_destination(tmp_path, bins, on_success).publish(record, set()) == Placed(record.id)
    assert tree(tmp_path)["results/a.jpg.json"] == record.sidecar


def test_a_vanished_source_is_no_trouble_before_there_are_bins(tmp_path: Path) -> None:
    record = drop(tmp_path)
    os.unlink(record.location)
    assert open_destination(tmp_path, "copy").publish(record, set()) == Placed(record.id)


@pytest.mark.parametrize(
    ("bins", "on_success"), [*MODES, ("none", "delete"), ("none", "move"), ("copy", "delete")]
)
def test_a_file_edited_in_place_with_equal_size_and_time_is_not_moved_copied_or_deleted(
    tmp_path: Path, bins: str, on_success: str
) -> None:
    record, inbox = drop(tmp_path), tmp_path / "inbox"
    # as `exiftool -P -overwrite_original_in_place` and `rsync --inplace -t` do
    (inbox / "a.jpg").write_bytes(b"other")
    os.utime(record.location, ns=(record.version.mtime_ns,) * 2)
    assert open_destination(tmp_path, bins, on_success).publish(record, set()) == Placed(record.id)
    assert [name for name, data in tree(tmp_path).items() if data == b"other"] == ["inbox/a.jpg"]


# The same again after a crash, or later


# A file too large to read has none.
@pytest.mark.parametrize("digest", [hashlib.sha256(b"image").digest(), b""])
def test_a_crash_between_copy_and_delete_leaves_one_file_not_two(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, digest: bytes
) -> None:
    destination, record = (
        open_destination(tmp_path, on_success="move", done=str(elsewhere)),
        drop(tmp_path, digest=digest),
    )
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr("daemon.inbox.sources.delete", lambda record: (_ for _ in ()).throw(KeyboardInterrupt))
        destination.publish(record, set())
    destination.publish(record, set())
    assert os.listdir(elsewhere) == ["a.jpg"]


@pytest.mark.parametrize("on_success", ["delete", "move"])
def test_a_crash_while_a_source_is_deleted_leaves_no_temporary_file_in_the_inbox(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, on_success: str
) -> None:
    destination, record = (
        open_destination(tmp_path, on_success=on_success, done=str(elsewhere)),
        drop(tmp_path),
    )
    unlink = os.unlink

    def die(path: bytes) -> None:
        if b".visiond-" in path:
            raise KeyboardInterrupt
        unlink(path)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(os, "unlink", die)
        destination.publish(record, set())
    destination.publish(record, set())
    assert os.listdir(tmp_path / "inbox") == []


@pytest.mark.parametrize("source", ["vanished", "newer"])
def test_another_file_with_the_temporary_name_stays(tmp_path: Path, source: str) -> None:
    record = drop(tmp_path)
    aside = Path(os.fsdecode(temporary_name(record.location)))
    aside.write_bytes(b"another image")
    location = Path(os.fsdecode(record.location))
    location.unlink() if source == "vanished" else location.write_bytes(b"a newer image")
    sources.delete(record)
    assert aside.read_bytes() == b"another image"


def test_two_mounts_of_one_file_system_get_one_copy_however_often_its_deletion_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only = True

    def refuse(old: bytes, new: bytes, **folders: int) -> None:
        if folders and os.path.dirname(new) != os.fsencode(tmp_path / "inbox"):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        if folders and read_only:
            raise OSError(errno.EROFS, "Read-only file system")
        rename_to_free(old, new, **folders)

    monkeypatch.setattr(sources, "rename_to_free", refuse)
    destination, record = open_destination(tmp_path, on_success="move"), drop(tmp_path)
    for _ in range(3):
        with pytest.raises(Held, match="Read-only"):
            destination.publish(record, set())
    assert sorted(tree(tmp_path)) == ["done/a.jpg", "inbox/a.jpg", "results/a.jpg.json"]
    read_only = False
    assert destination.publish(record, set()).location == os.fsencode(tmp_path / "done" / "a.jpg")
    assert sorted(tree(tmp_path)) == ["done/a.jpg", "results/a.jpg.json"]


def test_a_bin_that_a_power_failure_took_is_filled_again_from_where_the_source_lies_now(
    tmp_path: Path,
) -> None:
    destination, record = open_destination(tmp_path, "copy", "move"), drop(tmp_path)
    destination.publish(record, set())
    (tmp_path / "bins" / "A" / "a.jpg").unlink()
    destination.publish(record, set())
    assert tree(tmp_path) == dict.fromkeys(("bins/A/a.jpg", "done/a.jpg"), b"image") | {
        "results/a.jpg.json": record.sidecar
    }


def test_a_deletion_overwrites_no_file_that_has_its_temporary_name(tmp_path: Path) -> None:
    record = drop(tmp_path)
    other = Path(os.fsdecode(temporary_name(record.location)))
    other.write_bytes(b"somebody else's")
    sources.delete(record)
    assert not os.path.lexists(record.location)
    assert [(file.name, file.read_bytes()) for file in other.parent.iterdir()] == [
        (other.name, b"somebody else's")
    ]


def test_another_file_of_the_same_size_and_time_is_no_copy(tmp_path: Path) -> None:
    """The source would be deleted, and that file taken for it."""
    source, other = tmp_path / "a.jpg", tmp_path / "b.jpg"
    for path, data in ((source, b"mine"), (other, b"else")):
        path.write_bytes(data)
        os.utime(path, ns=(10**18, 10**18))
    version = Version.of(source.stat())
    record: Any = SimpleNamespace(location=os.fsencode(source), version=version, has_moved=True)
    assert not _is_copy(record, os.fsencode(other))
    other.write_bytes(b"mine")
    os.utime(other, ns=(10**18, 10**18))
    assert _is_copy(record, os.fsencode(other))
