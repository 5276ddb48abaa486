"""Folders in an inbox that cannot be read: all are reported, and nothing else is blocked."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from daemon.config.ignored import Ignored
from daemon.inbox.walk import MOST_NAMED, TOO_LONG, Unread, Walk
from tests.daemon_process import Daemon, Place, picture
from tests.inputs import png

EVENT = "folder cannot be read; it is tried again at every scan"


def nest(folder: Path, depth: int, data: bytes) -> None:
    """A file below this many folders, each made by its own short
    name: the whole path may be longer than the system allows."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 250, dir_fd=here)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    file = os.open("deep.png", os.O_WRONLY | os.O_CREAT, dir_fd=here)
    os.write(file, data)
    os.close(file)
    os.close(here)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """An image that can be read, one in a folder that cannot be listed,
    one in a folder that cannot be entered, and one that is too deep."""
    place = Place(tmp_path, {"pipeline": {"rescan_seconds": 0.2}, "http": {"listen": "127.0.0.1:0"}})
    for number, path in enumerate(("open.ppm", "closed/a.ppm", "half/b.ppm")):
        place.drop(path, picture(number))
    nest(place.inbox(), 20, png())
    (place.inbox() / "closed").chmod(0o000)
    (place.inbox() / "half").chmod(0o600)
    return place


def test_once_processes_everything_else_and_then_exits_as_for_an_unreadable_inbox(
    place: Place, humble: list[str]
) -> None:
    run = place.run_once(prefix=humble)
    assert run.returncode == os.EX_IOERR
    assert run.stdout.startswith("1 done, 0 failed, 0 skipped in ")
    assert f"Not every file was found: 3 folders in inbox {place.inbox()} cannot be read: " in run.stderr
    assert f"{place.inbox() / 'closed'}: Permission denied" in run.stderr
    assert run.stderr.count(EVENT) == 3
    assert place.rows("SELECT path, status FROM image") == [(b"open.ppm", 1)]
    (place.inbox() / "closed").chmod(0o700)
    (place.inbox() / "half").chmod(0o700)
    os.rename(place.inbox() / ("d" * 250), place.folder / "elsewhere")
    assert place.run_once(prefix=humble).returncode == 0
    place.assert_kept(DONE=3)


def test_once_also_reports_the_sinks_that_lack_records(tmp_path: Path) -> None:
    place = Place(tmp_path, {"output": {"sinks": ["jsonl"]}})
    (tmp_path / "results.jsonl").mkdir()
    place.drop("a.ppm", picture(1))
    nest(place.inbox(), 20, png())
    run = place.run_once()
    assert run.returncode == os.EX_IOERR
    assert "Not every file was found" in run.stderr
    assert "sink jsonl: 1 record behind" in run.stderr


def test_unread_folders_are_named_everywhere_and_read_once_they_can_be(
    place: Place, humble: list[str]
) -> None:
    with Daemon(place, prefix=humble) as daemon:
        status = daemon.wait_until(
            lambda status: status["unread_folders"] == 3 and status["done"] == 1, "word of all three"
        )
        assert status["obstacles"] == []
        assert f"{place.inbox() / 'half'}: Permission denied" in status["unread"]
        assert [line for line in status["unread"] if line.endswith(TOO_LONG)]
        assert daemon.metric("visiond_unread_folders", inbox=str(place.inbox())) == 3
        text = place.command("status").stdout
        assert "; 3 folders in inboxes cannot be read\n" in text
        assert f"cannot be read: {place.inbox() / 'closed'}: Permission denied\n" in text
        warning = f"3 folders in inbox {place.inbox()} cannot be read; `visiond status` lists them"
        assert daemon.get("/readyz") == (200, {"ready": True, "problems": [], "warnings": [warning]})
        page = daemon.dial()
        page.request("GET", "/api/status")
        public = json.loads(page.getresponse().read())
        page.close()
        assert status["log"]
        assert (public["unread_folders"], public["unread"], public["log"]) == (
            3,
            [],
            [],
        )  # the pages name no files

        (place.inbox() / "closed").chmod(0o700)
        (place.inbox() / "half").chmod(0o700)
        daemon.wait_until(lambda status: status["unread_folders"] == 1 and status["done"] == 3, "their files")
        for name in ("closed", "half"):
            daemon.wait_event(EVENT, path=str(place.inbox() / name))
            assert len(list(daemon.events(EVENT, path=str(place.inbox() / name)))) == 1
        (place.inbox() / "closed").chmod(0o000)  # it is gone, and comes back
        daemon.wait_until(lambda status: status["unread_folders"] == 2, "word of it")
        closed = str(place.inbox() / "closed")  # the log is written by a thread of its own, after that
        daemon.wait_until(
            lambda _: len(list(daemon.events(EVENT, path=closed))) == 2, "the second line in the log"
        )
        assert daemon.stop() == 0


def test_check_names_them(place: Place, humble: list[str]) -> None:
    checked = place.command("check", "--quick", prefix=humble)
    assert checked.returncode == 0  # `run` works without them
    assert re.search(
        r"^warning 3 folders in inbox .* cannot be read: .*/closed: Permission denied; ",
        checked.stdout,
        re.MULTILINE,
    )
    assert EVENT not in checked.stdout + checked.stderr


def test_a_million_of_them_take_bounded_room_and_all_are_counted(tmp_path: Path) -> None:
    unread = Unread(os.fsencode(tmp_path))
    for _ in range(2):
        unread.begin_scan()
        for number in range(MOST_NAMED + 500):
            unread.note(b"%d" % number, PermissionError(13, "Permission denied"))
        unread.end_scan()
        assert (len(unread), len(unread.causes), len(unread.lines())) == (MOST_NAMED + 500, MOST_NAMED, 20)
    unread.begin_scan()
    unread.end_scan()
    assert len(unread) == 0


def test_a_file_whose_result_would_have_too_long_a_path_is_passed_over_and_ends_nothing(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    # In the inbox the path just fits.
    nest(place.inbox(), (4095 - len(os.fsencode(place.inbox()))) // 251, png())
    place.configure({"output": {"results": "results/" + "r" * 250}})
    place.drop("a.ppm", picture(1))
    run = place.run_once()
    assert run.returncode == os.EX_IOERR
    assert "Not every file was found: 1 folder in inbox" in run.stderr
    assert place.rows("SELECT path, status FROM image") == [(b"a.ppm", 1)]
    assert TOO_LONG in place.command("check", "--quick").stdout


def test_files_that_vanish_during_a_walk_are_not_reported(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    unread = Unread(os.fsencode(tmp_path))

    def remove(path: bytes) -> None:
        if path:
            (tmp_path / "sub").rmdir()

    walk = Walk(unread.root, Ignored([]), True, unread, enter=remove)
    assert [found for found in walk.files() if found] == []
    assert len(unread) == 0
