"""Archives and documents that are dropped into the inbox of a real daemon."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
from pathlib import Path
from typing import Any, cast

import pytest

from daemon.cli.check_folders import examine_unpacking
from daemon.config.loading import parse
from daemon.core.errors import MissingLibrary
from daemon.core.jobs import Failure
from daemon.pipeline.containers import Containers
from daemon.pipeline.unpacker import count_at_once, open_unpacker
from daemon.unpacking.folder import NoRoom
from stages.contract.base import Reason
from tests.daemon.unpacking.containers import make_pages, make_tar, make_video, make_zip
from tests.daemon_process import Daemon, Place, picture, wait_for
from tests.makers import make_job

KINDS = ["zip", "tar", "tiff", "pdf", "video"]


@pytest.mark.parametrize(("cores", "count"), [(1, 2), (4, 2), (8, 4), (16, 8), (64, 8)])
def test_more_files_are_unpacked_at_once_on_more_cores(cores: int, count: int) -> None:
    assert count_at_once(cores) == count


def open_place(folder: Path, kinds: list[str] = KINDS, **settings: Any) -> Place:
    inbox = {"settle_seconds": 0.1, "unpack": kinds} | settings.pop("inbox", {})
    return Place(folder, {"inbox": [inbox]} | settings)


def states(place: Place) -> dict[str, tuple[str, str]]:
    """The state and the reason of each file."""
    names = {0: "pending", 1: "done", 2: "failed", 3: "skipped", 4: "gone"}
    rows = place.rows("SELECT path, status, COALESCE(reason, '') FROM image ORDER BY id")
    return {path.decode(): (names[status], reason) for path, status, reason in rows}


def forget(place: Place, *, members: bool) -> None:
    """Let the archive wait again, and with `members` forget what was in it."""
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as ledger, ledger:
        if members:
            ledger.execute("DELETE FROM publication")
            ledger.execute("DELETE FROM image WHERE path <> CAST('a.zip' AS BLOB)")
        ledger.execute(
            "UPDATE image SET status = 0, reason = NULL, finished_at = NULL, attempts = 0 WHERE path = CAST('a.zip' AS BLOB)"
        )


def pictures(*numbers: int) -> dict[str, bytes]:
    return {f"{number}.ppm": picture(number) for number in numbers}


def test_each_file_in_an_archive_or_document_is_an_image_of_its_own(tmp_path: Path) -> None:
    place = open_place(tmp_path)
    place.drop("a.zip", make_zip(pictures(1, 2) | {"notes.txt": b"no image"}))
    place.drop("b.tar.gz", make_tar(pictures(3)))
    place.drop("c.pdf", make_pages("PDF", 2))
    place.drop("d.tif", make_pages("TIFF", 2))
    place.drop("e.tif", make_pages("TIFF", 1))
    place.drop("f.mp4", make_video([0]))
    assert place.run_once().returncode == 0
    unpacked = ("skipped", "unpacked")
    assert states(place) == {
        "a.zip": unpacked,
        "a.zip.unpacked/1.ppm": ("done", ""),
        "a.zip.unpacked/2.ppm": ("done", ""),
        "a.zip.unpacked/notes.txt": ("skipped", "not-an-image"),
        "b.tar.gz": unpacked,
        "b.tar.gz.unpacked/3.ppm": ("done", ""),
        "c.pdf": unpacked,
        "c.pdf.unpacked/page-0001.png": ("done", ""),
        "c.pdf.unpacked/page-0002.png": ("done", ""),
        "d.tif": unpacked,
        "d.tif.unpacked/page-0001.png": ("done", ""),
        "d.tif.unpacked/page-0002.png": ("done", ""),
        "e.tif": ("done", ""),
        "f.mp4": unpacked,
        "f.mp4.unpacked/at-000000.000s.jpg": ("done", ""),
    }
    assert (tmp_path / "results/a.zip.unpacked/1.ppm.json").exists()
    assert place.run_once().returncode == 0  # and nothing is done again
    assert place.rows("SELECT MAX(attempts), COUNT(*) FROM image") == [(1, 15)]


def test_no_file_can_end_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would meet the file again at each start."""

    def meet_a_bug(*_: object) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(Containers, "_take_apart", meet_a_bug)
    containers = Containers(parse({}, tmp_path), {}, {})
    failure = containers.unpack(make_job(path=b"a.zip"), "zip")
    assert isinstance(failure, Failure)
    assert (failure.reason, failure.transient) == (Reason.CONTAINER, True)
    assert failure.detail == "unpacking failed: RecursionError: maximum recursion depth exceeded"


def test_without_the_setting_they_are_files_like_others(tmp_path: Path) -> None:
    place = open_place(tmp_path, kinds=[])
    place.drop("a.zip", make_zip(pictures(1)))
    assert place.run_once().returncode == 0
    assert states(place) == {"a.zip": ("skipped", "not-an-image")}


def test_what_cannot_be_unpacked_fails_with_a_reason_and_can_be_tried_again(tmp_path: Path) -> None:
    place = open_place(tmp_path)
    bad = place.drop("a.zip", b"no zip")
    assert place.run_once().returncode == 1
    assert states(place) == {"a.zip": ("failed", "container")}
    assert (
        "nothing was unpacked: it is damaged or incomplete, or not a zip file"
        in (tmp_path / "failed/a.zip.json").read_text()
    )
    bad.write_bytes(make_zip(pictures(1)))
    assert place.run_once().returncode == 0
    assert states(place)["a.zip.unpacked/1.ppm"] == ("done", "")


def test_retry_unpacks_again_and_leaves_nothing_in_the_failed_folder(tmp_path: Path) -> None:
    place = open_place(tmp_path, inbox={"on_success": "move"}, unpacking={"most_files": 1})
    place.drop("a.zip", make_zip(pictures(1, 2)))
    assert place.run_once().returncode == 1
    assert states(place) == {"a.zip": ("failed", "container")}
    assert sorted(os.listdir(tmp_path / "failed")) == ["a.zip", "a.zip.json"]
    place.configure({"unpacking": {"most_files": 2}})
    assert place.command("retry", "--all").returncode == 0
    assert place.run_once().returncode == 0
    assert states(place)["a.zip"] == ("skipped", "unpacked")
    assert sorted(os.listdir(tmp_path / "done")) == ["a.zip", "a.zip.unpacked"]
    assert not os.listdir(tmp_path / "failed")


@pytest.mark.parametrize(("fate", "left"), [("keep", True), ("move", False), ("delete", False)])
def test_the_archive_leaves_the_inbox_as_its_images_do(tmp_path: Path, fate: str, left: bool) -> None:
    place = open_place(tmp_path, inbox={"on_success": fate})
    place.drop("a.zip", make_zip(pictures(1)))
    assert place.run_once().returncode == 0
    inbox = tmp_path / "inbox"
    assert (inbox / "a.zip").exists() == (inbox / "a.zip.unpacked/1.ppm").exists() == left
    assert (tmp_path / "done/a.zip").exists() == (fate == "move")
    assert states(place) == {"a.zip": ("skipped", "unpacked"), "a.zip.unpacked/1.ppm": ("done", "")}


def test_an_archive_in_an_archive_stays_as_it_is_but_its_documents_are_unpacked(tmp_path: Path) -> None:
    place = open_place(tmp_path)
    inner = {"b.zip": make_zip(pictures(1)), "c.pdf": make_pages("PDF", 1)}
    place.drop("a.zip", make_zip(inner))
    assert place.run_once().returncode == 0
    assert states(place) == {
        "a.zip": ("skipped", "unpacked"),
        "a.zip.unpacked/b.zip": ("skipped", "not-an-image"),
        "a.zip.unpacked/c.pdf": ("skipped", "unpacked"),
        "a.zip.unpacked/c.pdf.unpacked/page-0001.png": ("done", ""),
    }


@pytest.mark.parametrize("fate", ["keep", "move", "delete"])
def test_what_a_killed_daemon_left_is_finished_by_the_next(tmp_path: Path, fate: str) -> None:
    """It was killed when everything was unpacked, and the archive moved or deleted, but its row had not ended."""
    place = open_place(tmp_path, inbox={"on_success": fate})
    place.drop("a.zip", make_zip(pictures(1, 2)))
    assert place.run_once().returncode == 0
    forget(place, members=fate == "keep")
    before = place.rows("SELECT id, inode FROM image WHERE status <> 0")
    assert place.run_once().returncode == 0
    assert states(place)["a.zip"] == ("skipped", "unpacked")
    assert set(before) <= set(place.rows("SELECT id, inode FROM image"))
    assert len(states(place)) == len(place.rows("SELECT id FROM image")) == 3
    if fate == "move":
        assert sorted(os.listdir(tmp_path / "done/a.zip.unpacked")) == ["1.ppm", "2.ppm"]


def test_without_its_library_the_daemon_does_not_start_and_check_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.unpacking.kinds.find_spec", lambda name: None)
    config = parse({"inbox": [{"unpack": ["zip", "pdf"]}]}, tmp_path)
    [finding] = examine_unpacking(config)
    assert finding.grade == "error"
    assert "pip install 'visiond[documents]'" in finding.text
    with pytest.raises(MissingLibrary, match="pypdfium2"):
        open_unpacker(config, {1: config.inbox[0]}, {}, cast(Any, None))


def test_a_trial_takes_as_many_archives_and_images_as_it_says(tmp_path: Path) -> None:
    place = open_place(tmp_path)
    place.drop("a.zip", make_zip(pictures(1, 2, 3)))
    assert place.command("run", "--once", "--limit", "2").returncode == 0
    ended = [state for state, _ in states(place).values() if state != "pending"]
    assert len(ended) == 2


def test_a_trial_tries_an_archive_again_and_ends(tmp_path: Path) -> None:
    place = open_place(tmp_path, unpacking={"most_bytes": 1 << 50, "most_ratio": 10**12})
    place.drop("a.zip", make_zip(pictures(1), claimed_bytes=1 << 47))  # more than any disk has
    assert place.command("run", "--once", "--limit", "1").returncode == 1
    assert states(place) == {"a.zip": ("failed", "container")}
    assert json.loads((tmp_path / "failed/a.zip.json").read_text())["attempts"] == 3


def test_on_a_full_disk_archives_wait_unless_the_run_is_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet_a_full_disk(*_: object) -> None:
        raise NoRoom(is_new=False)

    monkeypatch.setattr(Containers, "_take_apart", meet_a_full_disk)
    for once in (False, True):
        containers = Containers(parse({}, tmp_path), {}, {}, once=once)
        failure = containers.unpack(make_job(path=b"a.zip"), "zip")
        assert isinstance(failure, Failure)
        assert failure.away is not once


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EBUSY, errno.EROFS, errno.ENOLCK])
def test_an_error_that_may_pass_is_no_verdict_on_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def meet_it(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Containers, "_take_apart", meet_it)
    containers = Containers(parse({}, tmp_path), {}, {})
    failure = containers.unpack(make_job(path=b"a.zip"), "zip")
    assert isinstance(failure, Failure)
    assert failure.transient


def test_images_wait_for_no_archive_and_no_archive_for_images(tmp_path: Path) -> None:
    place = open_place(tmp_path)
    with Daemon(place) as daemon:
        daemon.wait_ready()
        place.drop_many(range(10))
        place.drop("a.zip", make_zip(pictures(11, 12)))
        wait_for(lambda: len(states(place)) == 13, "all rows")
        wait_for(lambda: all(state != "pending" for state, _ in states(place).values()), "the end")
        assert daemon.stop() == 0
    assert sum(state == "done" for state, _ in states(place).values()) == 12


def test_kinds_that_are_no_longer_unpacked_are_files_like_others(tmp_path: Path) -> None:
    place = open_place(tmp_path)
    place.drop("a.zip", make_zip(pictures(1)))
    assert place.run_once().returncode == 0
    forget(place, members=True)
    place.settings["inbox"][0]["unpack"] = ["tar"]
    place.configure()
    assert place.run_once().returncode == 0
    assert states(place)["a.zip"] == ("skipped", "not-an-image")
