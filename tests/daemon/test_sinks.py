from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from daemon.config import parse
from daemon.jobs import JobStatus, Placed, Version
from daemon.records import Record
from daemon.sinks import Sink, publish_records, sidecar_paths, write_sidecar, write_whole
from tests.makers import make_record

FAILED = {"status": JobStatus.FAILED, "outputs": {}, "models": [], "bin": "", "reason": "truncated", "detail": "no end"}
MODES = [
    ("none", "keep"),
    ("none", "move"),
    ("link", "keep"),
    ("link", "move"),
    ("copy", "keep"),
    ("copy", "move"),
    ("move", "keep"),
]


def open_sink(root: Path, bins: str = "none", on_success: str = "keep", **output: Any) -> Sink:
    """The sink of an inbox at root/inbox; every other folder is beside it."""
    tables = {"inbox": [{"path": "inbox", "on_success": on_success}], "output": {"bins": bins} | output}
    config = parse(tables, root)
    return Sink.of(config.inbox[0], config)


def drop(root: Path, path: bytes = b"a.jpg", data: bytes = b"image", **fields: Any) -> Record:
    """An image in root/inbox that is DONE and not published."""
    return make_record(root / "inbox", path, data, **fields)


def tree(root: Path) -> dict[str, bytes]:
    """Every file under root: its bytes, or where it links to."""
    found = {}
    for folder, _, names in os.walk(root):
        for path in (os.path.join(folder, name) for name in names):
            link = os.path.islink(path)
            content = os.fsencode("-> " + os.path.relpath(os.readlink(path), root)) if link else Path(path).read_bytes()
            found[os.path.relpath(path, root)] = content
    return found


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than tmp_path."""
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is only one file system here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


# Sidecars


def test_a_sidecar_lies_under_the_images_own_path(tmp_path: Path) -> None:
    record = drop(tmp_path, b"2026/11/a.jpg")
    assert open_sink(tmp_path).publish(record) == Placed(record.id)
    assert tree(tmp_path) == {"inbox/2026/11/a.jpg": b"image", "results/2026/11/a.jpg.json": record.sidecar}


def test_images_that_differ_in_their_suffix_have_sidecars_of_their_own(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    for name in (b"a.jpg", b"a.png"):
        sink.publish(drop(tmp_path, name))
    assert {"results/a.jpg.json", "results/a.png.json"} < tree(tmp_path).keys()


def test_a_name_that_is_not_utf8_keeps_its_bytes(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, bins="link")
    sink.publish(drop(tmp_path, b"\xff\n.jpg"))
    assert os.listdir(sink.results) == [b"\xff\n.jpg.json"]
    assert os.path.samefile(os.path.join(sink.bins, b"A", b"\xff\n.jpg"), os.path.join(sink.inbox, b"\xff\n.jpg"))


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


def test_a_sidecar_that_cannot_be_written_leaves_the_old_one_and_no_scrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, record = open_sink(tmp_path), drop(tmp_path)
    sink.publish(record)
    before = tree(tmp_path)
    write = os.write

    def fill_up(fd: int, data: bytes) -> int:
        if len(data) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:-50])

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(OSError, match="No space left"):
        sink.publish(make_record(tmp_path / "inbox", attempts=2))
    assert tree(tmp_path) == before


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOSPC])
def test_what_concerns_every_file_leaves_no_bin_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    sink, record = open_sink(tmp_path, "copy"), drop(tmp_path)

    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", refuse)
        with pytest.raises(OSError, match=os.strerror(error)):
            sink.publish(record)
    sink.publish(record)
    assert any(path.startswith("bins/") for path in tree(tmp_path))


@pytest.mark.parametrize(("length", "whole"), [(250, True), (251, False), (255, False)])
def test_a_long_name_is_cut_and_told_apart_by_a_digest(length: int, whole: bool) -> None:
    names = [b"x" * (length - 5) + tail for tail in (b"1.jpg", b"2.jpg")]
    sidecars = [os.path.basename(sidecar_paths(b"/results", b"sub/" + name)[0]) for name in names]
    assert [sidecar == name + b".json" for sidecar, name in zip(sidecars, names, strict=True)] == [whole, whole]
    assert [len(sidecar) for sidecar in sidecars] == [255, 255]
    assert len(set(sidecars)) == 2
    assert all(sidecar.endswith(b".json") for sidecar in sidecars)


def test_an_image_of_the_longest_name_has_a_sidecar(tmp_path: Path) -> None:
    record = drop(tmp_path, b"x" * 251 + b".jpg")
    open_sink(tmp_path).publish(record)
    [name] = os.listdir(tmp_path / "results")
    assert (tmp_path / "results" / name).read_bytes() == record.sidecar


def block_by_folder(results: Path) -> None:
    (results / "sub" / "a.jpg.json").mkdir(parents=True)


def block_by_file(results: Path) -> None:
    results.mkdir()
    (results / "sub").write_bytes(b"")


def block_by_length(results: Path) -> None:
    """Nothing: the path itself is too long."""


@pytest.mark.parametrize(
    ("block", "path"),
    [(block_by_folder, b"sub/a.jpg"), (block_by_file, b"sub/a.jpg"), (block_by_length, b"/".join([b"x" * 200] * 21))],
)
def test_a_sidecar_whose_place_is_taken_goes_to_the_top_under_a_digest(
    tmp_path: Path, block: Callable[[Path], None], path: bytes
) -> None:
    results = tmp_path / "results"
    block(results)
    records = [
        make_record(tmp_path / "inbox", path + number) for number in (b"", b"2") if number == b"" or block is block_by_file
    ]
    for record in records * 2:
        write_sidecar(os.fsencode(results), record)
    sidecars = [file for file in results.iterdir() if file.is_file() and file.name.startswith("~")]
    assert {file.read_bytes() for file in sidecars} == {record.sidecar for record in records}
    assert len(sidecars) == len(records)
    assert not list(results.rglob(".visiond-*"))


def test_an_inbox_with_a_name_has_sub_folders_of_its_own(tmp_path: Path) -> None:
    tables = {"inbox": [{"path": "in1", "name": "cam"}, {"path": "in2", "name": "scan"}], "output": {"failed": "/var/failed"}}
    config = parse(tables, tmp_path)
    sinks = [Sink.of(inbox, config) for inbox in config.inbox]
    root = os.fsencode(tmp_path)
    assert [sink.results for sink in sinks] == [root + b"/results/cam", root + b"/results/scan"]
    assert (sinks[0].failed, sinks[0].done, sinks[0].bins) == (b"/var/failed/cam", root + b"/done/cam", root + b"/bins/cam")


def test_images_of_an_inbox_that_is_no_longer_configured_wait(tmp_path: Path) -> None:
    mine, orphan = drop(tmp_path, inbox=1), drop(tmp_path, b"b.jpg", inbox=2, id=8)
    assert publish_records([orphan, mine], {1: open_sink(tmp_path)}) == [Placed(mine.id)]
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
def test_a_failed_image_has_its_reason_beside_it_and_is_never_deleted(
    tmp_path: Path, bins: str, on_success: str, moved: bool
) -> None:
    record = drop(tmp_path, b"sub/a.jpg", **FAILED)
    placed = open_sink(tmp_path, bins, on_success).publish(record)
    source = "failed/sub/a.jpg" if moved else "inbox/sub/a.jpg"
    assert tree(tmp_path) == {source: b"image", "failed/sub/a.jpg.json": record.sidecar}
    assert (placed.location is not None) is moved
    assert msgspec.json.decode(record.sidecar)["reason"] == "truncated"


def test_an_image_that_comes_to_be_done_leaves_the_failed_folder(tmp_path: Path) -> None:
    sink, record = open_sink(tmp_path, on_success="move"), drop(tmp_path, **FAILED)
    placed = sink.publish(record)
    assert placed.location is not None
    assert placed.version is not None
    retried = make_record(tmp_path / "inbox", location=placed.location, version=placed.version)
    sink.publish(retried)
    assert tree(tmp_path) == {"done/a.jpg": b"image", "results/a.jpg.json": retried.sidecar}


def test_an_image_that_fails_again_stays_where_its_first_failure_put_it(tmp_path: Path) -> None:
    sink, record = open_sink(tmp_path, on_success="move"), drop(tmp_path, **FAILED)
    placed = sink.publish(record)
    again = drop(tmp_path, **FAILED, location=placed.location, version=placed.version)
    (tmp_path / "inbox" / "a.jpg").unlink()
    sink.publish(again)
    assert tree(tmp_path) == {"failed/a.jpg": b"image", "failed/a.jpg.json": again.sidecar}


# The source and the bins


@pytest.mark.parametrize("bins", ["none", "link", "copy"])
def test_a_source_that_is_kept_stays_the_version_it_was(tmp_path: Path, bins: str) -> None:
    record = drop(tmp_path)
    assert open_sink(tmp_path, bins).publish(record) == Placed(record.id)
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
def test_source_and_bin_are_as_configured(tmp_path: Path, bins: str, on_success: str, files: dict[str, bytes]) -> None:
    record = drop(tmp_path, b"sub/a.jpg")
    open_sink(tmp_path, bins, on_success).publish(record)
    assert tree(tmp_path) == files | {"results/sub/a.jpg.json": record.sidecar}


@pytest.mark.parametrize(("bins", "on_success", "folder"), [("none", "move", "done"), ("move", "keep", "bins/A")])
def test_it_is_told_where_a_source_was_moved(tmp_path: Path, bins: str, on_success: str, folder: str) -> None:
    record = drop(tmp_path)
    target = tmp_path / folder / "a.jpg"
    placed = open_sink(tmp_path, bins, on_success).publish(record)
    assert placed == Placed(record.id, os.fsencode(target), Version.of(target.stat()))


def test_a_copy_has_the_sources_times(tmp_path: Path) -> None:
    record = drop(tmp_path)
    open_sink(tmp_path, bins="copy").publish(record)
    assert (tmp_path / "bins" / "A" / "a.jpg").stat().st_mtime_ns == record.version.mtime_ns


@pytest.mark.parametrize("bins", ["link", "copy"])
def test_a_new_version_leaves_the_bin_of_the_old_one(tmp_path: Path, bins: str) -> None:
    sink = open_sink(tmp_path, bins)
    for bin_name in ("A", "Receipts"):
        sink.publish(drop(tmp_path, bin=bin_name))
    sink.publish(drop(tmp_path, b"b.jpg", bin="A"))
    names = {name for name in tree(tmp_path) if name.startswith("bins/")}
    assert names == {"bins/Receipts/a.jpg", "bins/A/b.jpg"}


def test_a_file_of_the_same_name_in_done_is_never_overwritten(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, on_success="move")
    for number in (1, 2, 3):
        sink.publish(drop(tmp_path, data=b"image %d" % number, id=number))
    done = {name: data for name, data in tree(tmp_path).items() if name.startswith("done/")}
    assert done == {"done/a.jpg": b"image 1", "done/a~2.jpg": b"image 2", "done/a~3.jpg": b"image 3"}


def test_a_source_that_cannot_be_moved_stays_and_it_is_said(tmp_path: Path) -> None:
    sink, record = open_sink(tmp_path, on_success="move"), drop(tmp_path)
    (tmp_path / "done").write_bytes(b"no folder")
    with capture_logs() as logs:
        assert sink.publish(record) == Placed(record.id)
    assert [entry["event"] for entry in logs] == ["source stays where it is"]
    assert (tmp_path / "inbox" / "a.jpg").read_bytes() == b"image"
    assert (tmp_path / "results" / "a.jpg.json").read_bytes() == record.sidecar


@pytest.mark.parametrize(("bins", "folder"), [("none", "done"), ("move", "bins")])
def test_a_source_moves_across_file_systems(tmp_path: Path, elsewhere: Path, bins: str, folder: str) -> None:
    output = {"done": str(elsewhere / "done"), "bins_folder": str(elsewhere / "bins")}
    sink = open_sink(tmp_path, bins, "move" if bins == "none" else "keep", **output)
    record = drop(tmp_path)
    placed = sink.publish(record)
    assert placed.location == os.path.join(sink.done if bins == "none" else os.path.join(sink.bins, b"A"), b"a.jpg")
    assert placed.version == Version.of(os.stat(placed.location))
    assert placed.version.mtime_ns == record.version.mtime_ns
    assert list(tree(elsewhere).values()) == [b"image"]
    assert list(tree(tmp_path)) == ["results/a.jpg.json"]
    assert folder in os.listdir(elsewhere)


# Another version in the source's place


@pytest.mark.parametrize(("bins", "on_success"), [*MODES, ("none", "delete"), ("copy", "delete")])
def test_a_newer_version_is_neither_moved_nor_copied_nor_deleted(tmp_path: Path, bins: str, on_success: str) -> None:
    (tmp_path / "bins").mkdir()
    record = drop(tmp_path)
    drop(tmp_path, data=b"newer image")
    assert open_sink(tmp_path, bins, on_success).publish(record) == Placed(record.id)
    files = tree(tmp_path)
    assert files.pop("inbox/a.jpg") == b"newer image"
    assert files.pop("results/a.jpg.json") == record.sidecar
    assert set(files.values()) <= {b"-> inbox/a.jpg"}


@pytest.mark.parametrize(("bins", "on_success"), [("none", "move"), ("move", "keep"), ("none", "delete")])
def test_a_newer_version_that_slips_in_at_the_last_moment_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bins: str, on_success: str
) -> None:
    sink, record = open_sink(tmp_path, bins, on_success), drop(tmp_path)
    rename = os.rename

    def rename_too_late(old: bytes, new: bytes, **folders: int) -> None:
        if old == b"a.jpg":
            Path(os.fsdecode(record.location)).write_bytes(b"newer image")
        rename(old, new, **folders)

    with monkeypatch.context() as patch, contextlib.suppress(OSError):
        patch.setattr(os, "rename", rename_too_late)
        sink.publish(record)
    assert sink.publish(record) == Placed(record.id)
    assert tree(tmp_path) == {"inbox/a.jpg": b"newer image", "results/a.jpg.json": record.sidecar}


@pytest.mark.parametrize(("bins", "on_success"), [*MODES, ("none", "delete"), ("copy", "delete")])
def test_a_source_that_vanished_has_its_result_all_the_same(tmp_path: Path, bins: str, on_success: str) -> None:
    (tmp_path / "bins").mkdir()
    record = drop(tmp_path)
    os.unlink(record.location)
    assert open_sink(tmp_path, bins, on_success).publish(record) == Placed(record.id)
    assert tree(tmp_path)["results/a.jpg.json"] == record.sidecar


# Crashes


class Crash(BaseException):
    """The process is killed: nothing after this has any effect."""


def crash_after(calls: int, patch: pytest.MonkeyPatch) -> None:
    """After so many calls that touch files, each further one is as if the process were dead."""
    left = itertools.count(calls, -1)

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(left) <= 0:
                raise Crash
            return function(*arguments, **options)

        return call

    for name in ("open", "write", "rename", "unlink", "symlink", "mkdir", "sendfile", "utime", "fsync"):
        patch.setattr(os, name, mortal(getattr(os, name)))


@pytest.mark.parametrize("fields", [{}, FAILED], ids=["done", "failed"])
@pytest.mark.parametrize(("bins", "on_success"), MODES)
def test_publishing_again_after_a_crash_at_any_step_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bins: str, on_success: str, fields: dict[str, Any]
) -> None:
    def publish(root: Path, calls: int) -> bool:
        """Whether it was over before so many calls; publishes again if not."""
        sink, record = open_sink(root, bins, on_success), drop(root, b"sub/a.jpg", **fields)
        with monkeypatch.context() as patch, contextlib.suppress(Crash):
            crash_after(calls, patch)
            sink.publish(record)
            return True
        sink.publish(record)
        return False

    def outcome(root: Path) -> dict[str, bytes]:
        return {path: content.replace(os.fsencode(root), b"") for path, content in tree(root).items()}

    assert publish(tmp_path / "reference", 1000)
    for calls in range(1000):
        if publish(tmp_path / str(calls), calls):
            break
        assert outcome(tmp_path / str(calls)) == outcome(tmp_path / "reference"), f"killed after {calls} calls"
    assert calls > 3


@pytest.mark.parametrize("fields", [{}, FAILED], ids=["done", "failed"])
@pytest.mark.parametrize(("bins", "on_success"), [*MODES, ("none", "delete"), ("copy", "delete")])
def test_publishing_twice_changes_nothing(tmp_path: Path, bins: str, on_success: str, fields: dict[str, Any]) -> None:
    sink, record = open_sink(tmp_path, bins, on_success), drop(tmp_path, **fields)
    placed = sink.publish(record)
    before = tree(tmp_path)
    assert sink.publish(record) == placed
    assert tree(tmp_path) == before
