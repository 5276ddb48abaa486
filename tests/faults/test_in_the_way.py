"""A file, or a link that leads nowhere, stands where a folder should be: what belongs there waits until it is gone."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import Daemon, Place, picture, wait_for

MOVED = {"inbox": [{"settle_seconds": 0.1, "on_success": "move"}]}
THINGS = {"file": None, "link to nowhere": "nowhere", "link to itself": "d"}


def put(path: Path, thing: str = "file") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    target = THINGS[thing]
    path.symlink_to(path if target == "d" else target) if target else path.write_bytes(b"in the way")
    return path


@pytest.mark.parametrize(
    ("settings", "where", "thing"),
    [
        *((MOVED, "done/d", thing) for thing in THINGS),
        (MOVED, "failed/d", "file"),
        *(({"output": {"bins": "move"}}, "bins/A", thing) for thing in THINGS),
        ({"output": {"bins": "link"}}, "bins/A", "file"),
        (MOVED | {"output": {"bins": "copy"}}, "bins/A/d", "file"),
    ],
)
def test_once_ends_with_74_and_names_what_is_in_the_way_and_the_next_run_does_the_rest(
    tmp_path: Path, settings: dict[str, Any], where: str, thing: str
) -> None:
    place = Place(tmp_path, settings)
    for number in range(12):
        place.drop(f"d/{number}.ppm", picture(number))
    place.drop("d/bad.jpg", b"no picture")
    place.drop("other.ppm", picture(99))
    blocker = put(tmp_path / where, thing)
    run = place.run_once()
    assert run.returncode == os.EX_IOERR, run.stderr
    assert f"{blocker} is a {thing.split()[0]}" in run.stderr
    assert len(list(place.site.results.rglob("*.json"))) == 13
    blocker.unlink()
    assert place.run_once().returncode == 0, "only this time no image has failed"
    place.assert_kept(DONE=13, FAILED=1)


@pytest.mark.parametrize("thing", THINGS)
def test_a_sidecar_whose_folder_cannot_be_made_lies_at_the_top_and_holds_nothing_up(
    tmp_path: Path, thing: str
) -> None:
    place = Place(tmp_path)
    place.drop("d/a.ppm", picture(1))
    blocker = put(place.site.results / "d", thing)
    assert place.run_once().returncode == 0
    blocker.unlink()
    place.assert_kept(DONE=1)


@pytest.mark.parametrize("where", ["done/d", "bins/A"])
def test_a_daemon_goes_on_says_so_and_places_the_image_when_the_way_is_free(
    tmp_path: Path, where: str
) -> None:
    place = Place(tmp_path, MOVED | {"output": {"bins": "copy"}})
    blocker = put(tmp_path / where)
    with Daemon(place) as daemon:
        for number in range(10):
            place.drop(f"d/{number}.ppm", picture(number))
        place.drop_many(range(20, 30))
        status = daemon.wait_until(lambda status: str(blocker) in str(status["obstacles"]), "a problem")
        assert "remove it" in str(status["obstacles"])
        assert daemon.get("/readyz")[0] == 503
        daemon.wait_idle(20)
        blocker.unlink()
        daemon.wait_until(lambda status: not status["obstacles"], "no problem")
        wait_for(lambda: not list(place.inbox().rglob("*.ppm")), "all images leave")
        assert daemon.get("/readyz")[0] == 200
        assert daemon.stop() == 0
    place.assert_kept(DONE=20)


def test_the_ledger_knows_where_an_image_is_that_has_moved_and_has_no_bin_yet(tmp_path: Path) -> None:
    place = Place(tmp_path, MOVED | {"output": {"bins": "link"}})
    place.drop("a.ppm", picture(1))
    put(tmp_path / "bins" / "A")
    assert place.run_once().returncode == os.EX_IOERR
    assert place.rows("SELECT location, emitted FROM image") == [(os.fsencode(place.site.done / "a.ppm"), 0)]


def test_an_archive_that_cannot_leave_has_failed_and_says_why(tmp_path: Path) -> None:
    place = Place(tmp_path, {"inbox": [{"settle_seconds": 0.1, "on_success": "move", "unpack": ["zip"]}]})
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.ppm", picture(1))
    place.drop("d/a.zip", packed.getvalue())
    blocker = put(place.site.done / "d")
    assert place.run_once().returncode == os.EX_IOERR, "nor can what was in it"
    assert f"it was unpacked, but cannot leave its inbox: {place.inbox()}/d/a.zip: {blocker} is a file" in (
        place.command("list", "--status", "failed").stdout
    )
    blocker.unlink()
    assert place.command("retry", "--all").returncode == 0
    assert place.run_once().returncode == 0
    assert (blocker / "a.zip").exists()
    assert (blocker / "a.zip.unpacked" / "a.ppm").exists()


@pytest.mark.parametrize("settings", [MOVED, {"output": {"bins": "move"}}])
def test_a_file_whose_change_time_changed_before_it_could_be_moved_leaves_after_the_next_scan(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """As by chmod, or by the move of another link to the same file."""
    place = Place(tmp_path, settings)
    first = place.drop("a.ppm", picture(1))
    os.link(first, place.inbox() / "b.ppm")
    place.expect_contents("b.ppm", picture(1))
    for _ in range(2):
        assert place.run_once().returncode == 0
    assert not list(place.inbox().iterdir())


@pytest.mark.parametrize(("name", "where"), [("done", picture(1)), ("failed", b"no picture")])
def test_a_file_of_the_longest_name_gets_a_second_name_that_is_cut(
    tmp_path: Path, name: str, where: bytes
) -> None:
    place = Place(tmp_path, MOVED)
    longest = "ä" * 125 + "x.jpg"
    taken = put(tmp_path / name / longest)
    place.drop(longest, where)
    assert place.run_once().returncode == (name == "failed")
    assert taken.read_bytes() == b"in the way"
    [moved] = [file for file in taken.parent.iterdir() if file.suffix == ".jpg" and file != taken]
    assert moved.read_bytes() == where
    assert moved.name == "ä" * 124 + "~1.jpg"
    assert "1 whole" in place.command("verify").stdout


def test_a_folder_that_may_be_written_to_and_not_be_read_holds_nothing_up(
    tmp_path: Path, humble: list[str]
) -> None:
    place = Place(tmp_path, MOVED)
    for folder in (place.site.done / "d", place.site.results / "d"):
        folder.mkdir(parents=True)
        folder.chmod(0o333)
    place.drop("d/a.ppm", picture(1))
    assert place.run_once(prefix=humble).returncode == 0
    assert (place.site.done / "d" / "a.ppm").exists()


@pytest.mark.parametrize("thing", ["FIFO", "link to itself"])
def test_what_is_no_file_in_the_place_of_a_reason_or_an_earlier_sidecar_holds_nothing_up(
    tmp_path: Path, thing: str
) -> None:
    place = Place(tmp_path)
    source = place.drop("a.ppm", picture(1))
    for file in (place.site.failed / "a.ppm.json", place.site.results / "a.ppm.json"):
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        os.mkfifo(file) if thing == "FIFO" else file.symlink_to(file)
        if file.parent == place.site.failed:
            assert place.run_once().returncode == 0
    source.rename(place.inbox() / "b.ppm")
    assert place.run_once().returncode == 0
    assert (place.site.results / "b.ppm.json").exists()
