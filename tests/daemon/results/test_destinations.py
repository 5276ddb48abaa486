from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.config.loading import parse
from daemon.core.files import temporary_name
from daemon.core.jobs import JobStatus, Placed, Version
from daemon.core.sidecar import sidecar_paths
from daemon.inbox import sources
from daemon.results.destinations import (
    Destination,
    Held,
    publish_records,
    write_sidecar,
    write_whole,
)
from daemon.system.beneath import rename_to_free
from tests.makers import MODES, drop, make_record, open_destination, put_in_the_way, tree

FAILED: dict[str, Any] = {
    "status": JobStatus.FAILED,
    "outputs": {},
    "models": [],
    "bin": "",
    "reason": "truncated",
    "detail": "no end",
}


# Sidecars


def test_a_sidecar_lies_under_the_images_own_path(tmp_path: Path) -> None:
    record = drop(tmp_path, b"2026/11/a.jpg")
    assert open_destination(tmp_path).publish(record, set()) == Placed(record.id)
    assert tree(tmp_path) == {"inbox/2026/11/a.jpg": b"image", "results/2026/11/a.jpg.json": record.sidecar}


def test_images_that_differ_in_their_suffix_have_sidecars_of_their_own(tmp_path: Path) -> None:
    destination = open_destination(tmp_path)
    for name in (b"a.jpg", b"a.png"):
        destination.publish(drop(tmp_path, name), set())
    assert {"results/a.jpg.json", "results/a.png.json"} < tree(tmp_path).keys()


def test_a_name_that_is_not_utf8_keeps_its_bytes(tmp_path: Path) -> None:
    destination = open_destination(tmp_path, bins="link")
    destination.publish(drop(tmp_path, b"\xff\n.jpg"), set())
    assert os.listdir(destination.results) == [b"\xff\n.jpg.json"]
    assert os.path.samefile(
        os.path.join(destination.bins, b"A", b"\xff\n.jpg"), os.path.join(destination.inbox, b"\xff\n.jpg")
    )


def test_a_reader_never_sees_a_torn_sidecar(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg.json"
    contents = [msgspec.json.encode(["x" * size]) for size in (300_000, 10)]
    write_whole(os.fsencode(path), contents[0])
    seen: list[bool] = []

    def poll() -> None:
        while len(seen) < 300:
            seen.append(path.read_bytes() in contents)

    reader = threading.Thread(target=poll)
    reader.start()
    for content in itertools.cycle(contents):
        write_whole(os.fsencode(path), content)
        if not reader.is_alive():
            break
    reader.join()
    assert all(seen)


@pytest.mark.parametrize("kind", ["link", "hard link", "FIFO", "socket", "device", "folder"])
def test_what_has_the_temporary_name_of_a_sidecar_is_not_followed_and_not_waited_for(
    tmp_path: Path, kind: str
) -> None:
    """Another user of a results folder could let the daemon write over any of its files, or wait for ever."""
    (tmp_path / "diary").write_text("precious")
    destination, record = open_destination(tmp_path), drop(tmp_path)
    first, second = destination.paths_of(record)
    temporary = Path(os.fsdecode(temporary_name(first)))
    temporary.parent.mkdir()
    if kind == "link":
        temporary.symlink_to(tmp_path / "diary")
    elif kind == "hard link":
        temporary.hardlink_to(tmp_path / "diary")
    else:
        put_in_the_way(temporary, kind)
    destination.publish(record, set())
    assert (tmp_path / "diary").read_text() == "precious"
    written = Path(os.fsdecode(second if kind == "folder" else first))
    assert written.read_bytes() == record.sidecar
    assert not written.is_symlink()


def test_a_sidecar_that_cannot_be_written_leaves_the_old_one_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination, record = open_destination(tmp_path), drop(tmp_path)
    destination.publish(record, set())
    before = tree(tmp_path)
    write = os.write

    def fill_up(fd: int, data: bytes) -> int:
        if len(data) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:-50])

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(OSError, match="No space left"):
        destination.publish(make_record(tmp_path / "inbox", attempts=2), set())
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "error", [errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT]
)
def test_what_concerns_every_file_leaves_no_bin_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    destination, record = open_destination(tmp_path, "copy"), drop(tmp_path)

    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", refuse)
        with pytest.raises(OSError, match=os.strerror(error)):
            destination.publish(record, set())
    destination.publish(record, set())
    assert any(path.startswith("bins/") for path in tree(tmp_path))


@pytest.mark.parametrize(("length", "whole"), [(250, True), (251, False), (255, False)])
def test_a_long_name_is_cut_and_made_unique_by_a_digest(length: int, whole: bool) -> None:
    names = [b"x" * (length - 5) + tail for tail in (b"1.jpg", b"2.jpg")]
    sidecars = [os.path.basename(sidecar_paths(b"/results", b"sub/" + name)[0]) for name in names]
    assert [sidecar == name + b".json" for sidecar, name in zip(sidecars, names, strict=True)] == [
        whole,
        whole,
    ]
    assert [len(sidecar) for sidecar in sidecars] == [255, 255]
    assert len(set(sidecars)) == 2
    assert all(sidecar.endswith(b".json") for sidecar in sidecars)


def test_a_sidecars_name_is_cut_between_characters() -> None:
    sidecar_paths(b"/results", ("ä" * 125 + "b.jpg").encode())[0].decode()


def test_an_image_of_the_longest_name_has_a_sidecar(tmp_path: Path) -> None:
    record = drop(tmp_path, b"x" * 251 + b".jpg")
    open_destination(tmp_path).publish(record, set())
    [name] = os.listdir(tmp_path / "results")
    assert (tmp_path / "results" / name).read_bytes() == record.sidecar


def block_by_folder(results: Path) -> None:
    (results / "sub" / "a.jpg.json").mkdir(parents=True)


def block_by_file(results: Path) -> None:
    results.mkdir()
    (results / "sub").write_bytes(b"")


def block_by_length(results: Path) -> None:
    """Do nothing: the path itself is too long."""


@pytest.mark.parametrize(
    ("block", "path"),
    [
        (block_by_folder, b"sub/a.jpg"),
        (block_by_file, b"sub/a.jpg"),
        (block_by_length, b"/".join([b"x" * 200] * 21)),
    ],
)
def test_a_sidecar_whose_place_is_taken_goes_to_the_top_under_a_digest(
    tmp_path: Path, block: Callable[[Path], None], path: bytes
) -> None:
    results = tmp_path / "results"
    block(results)
    records = [
        make_record(tmp_path / "inbox", path + number)
        for number in (b"", b"2")
        if number == b"" or block is block_by_file
    ]
    for record in records * 2:
        write_sidecar(record, *sidecar_paths(os.fsencode(results), record.path))
    sidecars = [file for file in results.iterdir() if file.is_file() and file.name.startswith("~")]
    assert {file.read_bytes() for file in sidecars} == {record.sidecar for record in records}
    assert len(sidecars) == len(records)
    assert not list(results.rglob(".visiond-*"))


def test_an_inbox_with_a_name_has_its_own_sub_folders(tmp_path: Path) -> None:
    tables = {
        "inbox": [{"path": "in1", "name": "cam"}, {"path": "in2", "name": "scan"}],
        "output": {"failed": "/var/failed"},
    }
    config = parse(tables, tmp_path)
    destinations = [Destination.of(inbox, config) for inbox in config.inbox]
    root = os.fsencode(tmp_path)
    assert [destination.results for destination in destinations] == [
        root + b"/results/cam",
        root + b"/results/scan",
    ]
    assert (destinations[0].failed, destinations[0].done, destinations[0].bins) == (
        b"/var/failed/cam",
        root + b"/done/cam",
        root + b"/bins/cam",
    )


def test_images_of_an_inbox_that_is_no_longer_configured_wait(tmp_path: Path) -> None:
    mine, orphan = drop(tmp_path, inbox=1), drop(tmp_path, b"b.jpg", inbox=2, id=8)
    assert publish_records([orphan, mine], {1: open_destination(tmp_path)}).placed == [Placed(mine.id)]
    assert not (tmp_path / "results" / "b.jpg.json").exists()


# The failed folder


@pytest.mark.parametrize(
    ("bins", "on_success", "moved"),
    [
        ("none", "keep", False),
        ("copy", "keep", False),
        ("none", "move", True),
        ("none", "delete", True),
        ("move", "keep", True),
    ],
)
def test_a_failed_image_has_its_reason_next_to_it_and_is_never_deleted(
    tmp_path: Path, bins: str, on_success: str, moved: bool
) -> None:
    record = drop(tmp_path, b"sub/a.jpg", **FAILED)
    placed = open_destination(tmp_path, bins, on_success).publish(record, set())
    source = "failed/sub/a.jpg" if moved else "inbox/sub/a.jpg"
    assert tree(tmp_path) == {source: b"image", "failed/sub/a.jpg.json": record.sidecar}
    assert (placed.location is not None) is moved
    assert msgspec.json.decode(record.sidecar)["reason"] == "truncated"


@pytest.mark.parametrize(
    ("bins", "on_success", "fields", "expected"),
    [
        ("none", "keep", {}, {"results/sub"}),
        ("link", "keep", {}, {"results/sub", "bins/A/sub"}),
        ("copy", "move", {}, {"results/sub", "bins/A/sub", "inbox/sub", "done/sub"}),
        ("move", "keep", {}, {"results/sub", "bins/A/sub", "inbox/sub"}),
        ("none", "delete", {}, {"results/sub", "inbox/sub"}),
        ("none", "keep", FAILED, {"failed/sub"}),
        ("none", "move", FAILED, {"failed/sub", "inbox/sub"}),
    ],
)
def test_every_folder_in_which_a_file_was_added_or_removed_is_flushed(
    tmp_path: Path, bins: str, on_success: str, fields: dict[str, Any], expected: set[str]
) -> None:
    record = drop(tmp_path, b"sub/a.jpg", **({"bin": "A"} | fields))
    publication = publish_records([record], {record.inbox: open_destination(tmp_path, bins, on_success)})
    assert {os.path.relpath(os.fsdecode(folder), tmp_path) for folder in publication.folders} == expected


@pytest.mark.parametrize(("mode", "place"), [(("none", "move"), "done"), (("move", "keep"), "bins/A")])
def test_sinks_get_the_place_to_which_a_file_was_moved(
    tmp_path: Path, mode: tuple[str, str], place: str
) -> None:
    record = drop(tmp_path, b"sub/a.jpg", bin="A")
    [sent] = publish_records([record], {record.inbox: open_destination(tmp_path, *mode)}).records
    assert os.fsdecode(sent.location) == str(tmp_path / place / "sub" / "a.jpg")
    assert sent.has_file()


def test_a_folder_from_which_an_earlier_result_is_removed_is_flushed_too(tmp_path: Path) -> None:
    destination = open_destination(tmp_path, "link")
    destination.publish(drop(tmp_path, b"sub/a.jpg", **FAILED), set())
    for bin, expected in (
        ("A", {"failed/sub", "results/sub", "bins/A/sub"}),
        ("B", {"bins/A/sub", "bins/B/sub", "results/sub"}),
    ):
        record = drop(tmp_path, b"sub/a.jpg", bin=bin)
        folders = publish_records([record], {record.inbox: destination}).folders
        assert {os.path.relpath(os.fsdecode(folder), tmp_path) for folder in folders} == expected


def test_an_image_that_becomes_done_leaves_the_failed_folder(tmp_path: Path) -> None:
    destination, record = open_destination(tmp_path, on_success="move"), drop(tmp_path, **FAILED)
    placed = destination.publish(record, set())
    assert placed.location is not None
    assert placed.version is not None
    retried = make_record(tmp_path / "inbox", location=placed.location, version=placed.version)
    destination.publish(retried, set())
    assert tree(tmp_path) == {"done/a.jpg": b"image", "results/a.jpg.json": retried.sidecar}


def test_an_image_that_fails_again_stays_where_its_first_failure_put_it(tmp_path: Path) -> None:
    destination, record = open_destination(tmp_path, on_success="move"), drop(tmp_path, **FAILED)
    placed = destination.publish(record, set())
    again = drop(tmp_path, **FAILED, location=placed.location, version=placed.version)
    (tmp_path / "inbox" / "a.jpg").unlink()
    destination.publish(again, set())
    assert tree(tmp_path) == {"failed/a.jpg": b"image", "failed/a.jpg.json": again.sidecar}


def test_failed_images_with_the_same_name_have_their_own_reasons_and_lose_them_when_they_become_done(
    tmp_path: Path,
) -> None:
    destination = open_destination(tmp_path, on_success="move")
    first = drop(tmp_path, data=b"cut", **FAILED)
    destination.publish(first, set())
    second = drop(tmp_path, data=b"cut anew", id=8, **FAILED)
    placed = destination.publish(second, set())
    assert destination.publish(second, set()) == placed  # after a crash
    older = {"failed/a.jpg": b"cut", "failed/a.jpg.json": first.sidecar}
    assert tree(tmp_path) == older | {"failed/a~8.jpg": b"cut anew", "failed/a~8.jpg.json": second.sidecar}
    assert placed.location is not None
    assert placed.version is not None
    retried = make_record(tmp_path / "inbox", id=8, location=placed.location, version=placed.version)
    destination.publish(retried, set())
    assert tree(tmp_path) == older | {"done/a.jpg": b"cut anew", "results/a.jpg.json": retried.sidecar}


def test_the_reason_next_to_a_failed_image_stays_when_a_fixed_version_is_done(tmp_path: Path) -> None:
    destination, failed = open_destination(tmp_path, on_success="move"), drop(tmp_path, data=b"cut", **FAILED)
    destination.publish(failed, set())
    fixed = drop(tmp_path, id=8)
    destination.publish(fixed, set())
    assert tree(tmp_path) == {
        "failed/a.jpg": b"cut",
        "failed/a.jpg.json": failed.sidecar,
        "done/a.jpg": b"image",
        "results/a.jpg.json": fixed.sidecar,
    }


def test_the_reason_of_a_failed_image_is_removed_when_a_fixed_version_replaces_it(tmp_path: Path) -> None:
    destination = open_destination(tmp_path)
    destination.publish(drop(tmp_path, data=b"cut", **FAILED), set())
    fixed = drop(tmp_path, id=8)
    destination.publish(fixed, set())
    assert tree(tmp_path) == {"inbox/a.jpg": b"image", "results/a.jpg.json": fixed.sidecar}


@pytest.mark.parametrize("on_success", ["keep", "move"])
def test_a_reason_never_takes_the_place_of_that_of_a_moved_image(tmp_path: Path, on_success: str) -> None:
    first = drop(tmp_path, data=b"cut", **FAILED)
    open_destination(tmp_path, on_success="move").publish(first, set())
    destination, second = (
        open_destination(tmp_path, on_success=on_success),
        drop(tmp_path, data=b"cut anew", id=8, **FAILED),
    )
    if on_success == "move":
        os.unlink(second.location)  # so that it cannot be
    destination.publish(second, set())
    beside = {"failed/a.jpg": b"cut", "failed/a.jpg.json": first.sidecar}
    assert (beside | {"failed/a~8.jpg.json": second.sidecar}).items() <= tree(tmp_path).items()
    destination.publish(make_record(tmp_path / "inbox", id=8), set())
    assert {name for name in tree(tmp_path) if name.startswith("failed/")} == beside.keys()


def test_an_image_that_got_the_third_name_is_found_there_after_a_crash(tmp_path: Path) -> None:
    destination = open_destination(tmp_path, on_success="move")
    first = drop(tmp_path, data=b"cut", **FAILED)
    destination.publish(first, set())
    (tmp_path / "failed" / "a~8.jpg").write_bytes(b"the user's")
    second = drop(tmp_path, data=b"cut anew", id=8, **FAILED)
    placed = destination.publish(second, set())
    assert placed.location == os.fsencode(tmp_path / "failed" / "a~8.2.jpg")
    assert destination.publish(second, set()) == placed
    assert (tmp_path / "failed" / "a.jpg.json").read_bytes() == first.sidecar


def test_a_reason_under_its_second_name_goes_too_once_its_image_is_done(tmp_path: Path) -> None:
    (tmp_path / "failed" / "a.jpg.json").mkdir(parents=True)
    destination = open_destination(tmp_path)
    destination.publish(drop(tmp_path, data=b"cut", **FAILED), set())
    assert any(name.startswith("failed/~") for name in tree(tmp_path))
    destination.publish(drop(tmp_path, id=8), set())
    assert tree(tmp_path).keys() == {"inbox/a.jpg", "results/a.jpg.json"}


def test_a_path_too_long_for_the_failed_folder_does_not_stop_the_daemon(tmp_path: Path) -> None:
    record = drop(tmp_path)
    long = b"/".join([b"d" * 250] * 16) + b"/a.jpg"
    record = dataclasses.replace(record, path=long)
    open_destination(tmp_path).publish(record, set())
    assert [path.read_bytes() for path in (tmp_path / "results").iterdir()] == [record.sidecar]


def test_a_failed_image_whose_name_could_be_that_of_anothers_reason_stays_where_it_is(tmp_path: Path) -> None:
    destination = open_destination(tmp_path, on_success="move")
    first = drop(tmp_path, b"b.jpg.json", b"half an image", status=JobStatus.FAILED)
    second = drop(tmp_path, b"b.jpg", b"the other half", id=8, status=JobStatus.FAILED)
    for record in (first, second):
        destination.publish(record, set())
    assert (tmp_path / "inbox" / "b.jpg.json").read_bytes() == b"half an image"
    assert (tmp_path / "failed" / "b.jpg").read_bytes() == b"the other half"
    assert (tmp_path / "failed" / "b.jpg.json").read_bytes() == second.sidecar


# The source and the bins


@pytest.mark.parametrize("bins", ["none", "link", "copy"])
def test_a_source_that_is_kept_stays_the_version_it_was(tmp_path: Path, bins: str) -> None:
    record = drop(tmp_path)
    assert open_destination(tmp_path, bins).publish(record, set()) == Placed(record.id)
    assert Version.of(os.lstat(record.location)) == record.version


@pytest.mark.parametrize(
    ("bins", "on_success", "files"),
    [
        ("none", "keep", {"inbox/sub/a.jpg": b"image"}),
        ("none", "move", {"done/sub/a.jpg": b"image"}),
        ("none", "delete", {}),
        ("link", "keep", {"inbox/sub/a.jpg": b"image", "bins/A/sub/a.jpg": b"-> inbox/sub/a.jpg"}),
        ("link", "move", {"done/sub/a.jpg": b"image", "bins/A/sub/a.jpg": b"-> done/sub/a.jpg"}),
        ("copy", "keep", {"inbox/sub/a.jpg": b"image", "bins/A/sub/a.jpg": b"image"}),
        ("copy", "move", {"done/sub/a.jpg": b"image", "bins/A/sub/a.jpg": b"image"}),
        ("copy", "delete", {"bins/A/sub/a.jpg": b"image"}),
        ("move", "keep", {"bins/A/sub/a.jpg": b"image"}),
    ],
)
def test_source_and_bin_are_as_configured(
    tmp_path: Path, bins: str, on_success: str, files: dict[str, bytes]
) -> None:
    record = drop(tmp_path, b"sub/a.jpg")
    open_destination(tmp_path, bins, on_success).publish(record, set())
    assert tree(tmp_path) == files | {"results/sub/a.jpg.json": record.sidecar}


@pytest.mark.parametrize(
    ("bins", "on_success", "folder"), [("none", "move", "done"), ("move", "keep", "bins/A")]
)
def test_the_place_to_which_a_source_was_moved_is_returned(
    tmp_path: Path, bins: str, on_success: str, folder: str
) -> None:
    record = drop(tmp_path)
    target = tmp_path / folder / "a.jpg"
    placed = open_destination(tmp_path, bins, on_success).publish(record, set())
    assert placed == Placed(record.id, os.fsencode(target), Version.of(target.stat()))


@pytest.mark.parametrize("bins", ["link", "copy"])
def test_a_new_version_leaves_the_bin_of_the_old_one(tmp_path: Path, bins: str) -> None:
    destination = open_destination(tmp_path, bins)
    for bin_name in ("A", "Receipts"):
        destination.publish(drop(tmp_path, bin=bin_name), set())
    destination.publish(drop(tmp_path, b"b.jpg", bin="A"), set())
    names = {name for name in tree(tmp_path) if name.startswith("bins/")}
    assert names == {"bins/Receipts/a.jpg", "bins/A/b.jpg"}


@pytest.mark.parametrize("bins", ["link", "copy"])
def test_a_new_version_leaves_the_bin_that_a_rule_of_the_users_chose_also_after_a_restart(
    tmp_path: Path, bins: str
) -> None:
    destination = open_destination(tmp_path, bins)
    destination.publish(drop(tmp_path, id=1, bin="rest"), set())
    destination.publish(drop(tmp_path, id=2, bin="other"), set())
    assert [path.name for path in (tmp_path / "bins").iterdir() if any(path.iterdir())] == ["other"]
    after = open_destination(tmp_path, bins)
    after.known_bins.add(b"other")  # as the ledger says
    after.publish(drop(tmp_path, id=3, bin="third"), set())
    assert [path.name for path in (tmp_path / "bins").iterdir() if any(path.iterdir())] == ["third"]


@pytest.mark.parametrize(("bins", "stays"), [("link", False), ("copy", True)])
def test_no_bin_has_a_link_to_a_version_that_failed(tmp_path: Path, bins: str, stays: bool) -> None:
    destination = open_destination(tmp_path, bins)
    destination.publish(drop(tmp_path), set())
    destination.publish(drop(tmp_path, data=b"cut", id=8, **FAILED), set())
    assert ("bins/A/a.jpg" in tree(tmp_path)) is stays


def test_a_bin_that_has_the_only_copies_keeps_them_all(tmp_path: Path) -> None:
    destination = open_destination(tmp_path, "copy", "delete")
    for number, bin_name in enumerate("AAB", 7):
        destination.publish(drop(tmp_path, data=b"image %d" % number, id=number, bin=bin_name), set())
    files = tree(tmp_path / "bins")
    assert files == {"A/a.jpg": b"image 7", "A/a~8.jpg": b"image 8", "B/a.jpg": b"image 9"}


@pytest.mark.parametrize("bins", ["link", "copy"])
@pytest.mark.parametrize(
    "blocker", ["bins/A/sub/a.jpg/", "bins/A/sub", "bins/B/sub/a.jpg/", "failed/sub/a.jpg.json/"]
)
def test_a_file_in_the_way_in_a_bin_does_not_stop_the_daemon(tmp_path: Path, bins: str, blocker: str) -> None:
    path = tmp_path / blocker
    path.parent.mkdir(parents=True)
    path.mkdir() if blocker.endswith("/") else path.write_bytes(b"")
    record = drop(tmp_path, b"sub/a.jpg")
    destination = open_destination(tmp_path, bins)
    is_its_own = blocker.startswith("bins/A")
    with pytest.raises(Held, match=f"{path} is a f") if is_its_own else contextlib.nullcontext():
        destination.publish(record, set())
    assert (tmp_path / "results" / "sub" / "a.jpg.json").read_bytes() == record.sidecar
    path.rmdir() if blocker.endswith("/") else path.unlink()
    destination.publish(record, set())
    assert (tmp_path / "bins" / "A" / "sub" / "a.jpg").read_bytes() == b"image"


def test_the_users_own_folders_among_the_bins_are_left_alone(tmp_path: Path) -> None:
    record = drop(tmp_path)
    mine = tmp_path / "bins" / "holidays" / "a.jpg"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    open_destination(tmp_path, "copy").publish(record, set())
    assert mine.read_bytes() == b"mine"


# Crashes


class Crash(BaseException):
    """The process is killed: nothing after this has any effect."""


def crash_after(calls: int, patch: pytest.MonkeyPatch) -> None:
    """After this number of calls that change files, further ones do nothing, as if the process were dead."""
    left = itertools.count(calls, -1)

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(left) <= 0:
                raise Crash
            return function(*arguments, **options)

        return call

    for name in ("open", "write", "rename", "unlink", "symlink", "mkdir", "sendfile", "utime", "fsync"):
        patch.setattr(os, name, mortal(getattr(os, name)))
    patch.setattr(sources, "rename_to_free", mortal(rename_to_free))


@pytest.mark.parametrize("fields", [{}, FAILED], ids=["done", "failed"])
@pytest.mark.parametrize(("bins", "on_success"), MODES)
def test_publishing_again_after_a_crash_at_any_step_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bins: str, on_success: str, fields: dict[str, Any]
) -> None:
    def publish(root: Path, calls: int) -> bool:
        """Whether it took fewer calls than this; if not, publishes again."""
        destination, record = open_destination(root, bins, on_success), drop(root, b"sub/a.jpg", **fields)
        with monkeypatch.context() as patch, contextlib.suppress(Crash):
            crash_after(calls, patch)
            destination.publish(record, set())
            return True
        destination.publish(record, set())
        return False

    def outcome(root: Path) -> dict[str, bytes]:
        return {path: content.replace(os.fsencode(root), b"") for path, content in tree(root).items()}

    assert publish(tmp_path / "reference", 1000)
    for calls in range(1000):
        if publish(tmp_path / str(calls), calls):
            break
        assert outcome(tmp_path / str(calls)) == outcome(tmp_path / "reference"), (
            f"killed after {calls} calls"
        )
    assert calls > 3


@pytest.mark.parametrize("fields", [{}, FAILED], ids=["done", "failed"])
@pytest.mark.parametrize(("bins", "on_success"), [*MODES, ("none", "delete"), ("copy", "delete")])
def test_publishing_twice_changes_nothing(
    tmp_path: Path, bins: str, on_success: str, fields: dict[str, Any]
) -> None:
    destination, record = open_destination(tmp_path, bins, on_success), drop(tmp_path, **fields)
    placed = destination.publish(record, set())
    before = tree(tmp_path)
    assert destination.publish(record, set()) == placed
    assert tree(tmp_path) == before


def test_a_result_leaves_the_reason_of_an_image_that_is_called_like_its_second_name(tmp_path: Path) -> None:
    destination = open_destination(tmp_path)
    destination.publish(
        failure := drop(tmp_path, b"a~2.jpg", id=1, status=JobStatus.FAILED, reason="truncated"), set()
    )
    destination.publish(drop(tmp_path, b"a.jpg", id=2), set())
    assert tree(tmp_path)["failed/a~2.jpg.json"] == failure.sidecar
    destination.publish(drop(tmp_path, b"a~2.jpg", id=3), set())
    assert "failed/a~2.jpg.json" not in tree(tmp_path)


@pytest.mark.parametrize("bin_name", ["A", "B"])
@pytest.mark.parametrize("bins", ["link", "copy"])
def test_an_image_that_was_moved_into_a_bin_once_is_safe_there(
    tmp_path: Path, bins: str, bin_name: str
) -> None:
    record = drop(tmp_path)
    placed = open_destination(tmp_path, "move").publish(record, set())
    assert placed.location
    assert placed.version
    again = dataclasses.replace(record, location=placed.location, version=placed.version, bin=bin_name)
    open_destination(tmp_path, bins).publish(again, set())
    only = tmp_path / "bins" / "A" / "a.jpg"
    assert not only.is_symlink()
    assert only.read_bytes() == (tmp_path / "bins" / bin_name / "a.jpg").read_bytes() == b"image"
