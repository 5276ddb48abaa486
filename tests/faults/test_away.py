"""A folder that goes away under the daemon: unmounted or renamed, with an empty one in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from daemon.core.jobs import JobStatus
from daemon.system.mounts import FolderIdentity
from tests.daemon_process import Daemon, Place, picture, wait_for
from tests.faults.test_disk import mounted

SLOW = {"stages": {"ocr": {"options": {"latency_per_image_seconds": 5.0}}}}
MOVES = {"inbox": [{"settle_seconds": 0.1, "on_success": "move"}]}


def problems_of(daemon: Daemon) -> str:
    code, ready = daemon.get("/readyz")
    return str(ready["problems"]) if code == 503 else ""


def wait_away(daemon: Daemon, folder: Path) -> None:
    wait_for(lambda: str(folder) in problems_of(daemon), "the folder's name on /readyz")


def wait_back(daemon: Daemon) -> None:
    wait_for(lambda: daemon.get("/readyz")[0] == 200, "readiness")


def test_results_that_are_moved_away_are_noticed_while_idle_and_nothing_is_published_elsewhere(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, MOVES)
    results, aside = place.site.results, tmp_path / "aside"
    with Daemon(place) as daemon:
        place.drop_many(range(5))
        daemon.wait_idle(5)
        results.rename(aside)
        wait_away(daemon, results)
        results.mkdir()
        place.drop_many(range(5, 20))
        daemon.wait_until(lambda status: status["in_flight"] > 0, "images at work")
        wait_away(daemon, results)
        status = daemon.wait_until(
            lambda status: "wait only for that" in str(status["obstacles"]), "the reason"
        )
        listed = place.command("list", "--status", "done", "--limit", "99").stdout.splitlines()
        [waiting] = [int(why.split()[0]) for why in status["obstacles"] if "wait only for that" in why]
        assert len(listed) - 5 >= waiting > 0, "these are pending for `status` and done for `list`"
        number = listed[0].split("\t")[0]
        wait_for(
            lambda: "1 image that is DONE has no sidecar yet" in place.command("show", number).stderr,
            "a hint",
        )
        for command in (["list"], ["export", "-"]):
            assert (
                "images that are DONE have no sidecar yet: `visiond status" in place.command(*command).stderr
            )
        assert not list(results.iterdir())
        assert len(list(place.site.done.rglob("*.ppm"))) == 5
        results.rmdir()
        aside.rename(results)
        daemon.wait_idle(20)
        wait_back(daemon)
        assert "no sidecar yet" not in place.command("list").stderr
        log, events = daemon.log_text(), (f'"event": "{word}"' for word in ("paused", "resumed"))
        assert [log.count(event) for event in events] == [1, 1], "once, and not for each part of the daemon"
        assert daemon.stop() == 0
    place.assert_kept(DONE=20)


def test_results_that_were_moved_away_while_the_daemon_was_down_are_named_at_the_start(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    place.drop("a.ppm", picture(1))
    said = "the folder of results is gone; a new one is made"
    assert said not in place.run_once().stderr
    place.site.results.rename(tmp_path / "aside")
    again = place.run_once()
    assert again.returncode == 0
    assert said in again.stderr
    assert said not in place.run_once().stderr


def test_results_whose_mount_is_gone_are_noticed_and_wait_for_it(tmp_path: Path) -> None:
    place = Place(tmp_path)
    results = place.site.results
    with mounted(results, "4m"):
        with Daemon(place) as daemon:
            place.drop_many(range(5))
            daemon.wait_idle(5)
            assert os.system(f"umount --lazy '{results}'") == 0  # what is below the mount point shows now
            try:
                place.drop_many(range(5, 20))
                wait_away(daemon, results)
                assert not list(results.iterdir())
                assert daemon.stop() == 0
            finally:
                assert os.system(f"mount -t tmpfs visiond-test '{results}'") == 0
        assert place.run_once().returncode == 0  # a start takes the folder that is there
        assert len(list(results.glob("*.json"))) == 15


def test_images_of_an_inbox_that_is_moved_away_stay_pending_until_it_is_back(tmp_path: Path) -> None:
    place = Place(tmp_path, SLOW)
    inbox, aside = place.inbox(), tmp_path / "aside"
    with Daemon(place) as daemon:
        place.drop_many(range(300))
        daemon.wait_until(lambda status: status["pending"] == 300, "300 rows")
        inbox.rename(aside)
        inbox.mkdir()
        wait_away(daemon, inbox)
        assert daemon.status()["gone"] == 0
        inbox.rmdir()
        aside.rename(inbox)
        wait_back(daemon)
        assert (daemon.status()["gone"], daemon.status()["failed"]) == (0, 0)
        daemon.kill()


def test_an_inbox_that_is_not_mounted_at_the_start_ends_a_run_with_74_and_a_touch_says_that_it_was_emptied(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, SLOW)
    inbox = place.inbox()
    with Daemon(place) as daemon:
        place.drop_many(range(3))
        daemon.wait_until(lambda status: status["pending"] == 3, "3 rows")
        daemon.kill()
    inbox.rename(tmp_path / "aside")
    inbox.mkdir()  # as a container makes a mount point
    if not FolderIdentity.of(bytes(inbox)).born:
        pytest.skip("this file system does not say when a folder was made")
    place.settings["stages"]["ocr"].pop("options")
    place.configure()
    ended = place.run_once()
    assert ended.returncode == os.EX_IOERR
    assert f"touch {inbox}" in ended.stderr.replace("\n", " ")
    assert place.rows("SELECT DISTINCT status FROM image") == [(JobStatus.PENDING,)]
    os.utime(inbox)
    assert place.run_once().returncode == 0
    with Daemon(place) as daemon:
        assert daemon.status()["gone"] == 3
        assert daemon.stop() == 0


def test_images_that_a_user_deletes_are_gone(tmp_path: Path) -> None:
    place = Place(tmp_path, {"pipeline": {"slab_bytes": 1 << 20}, **SLOW})
    with Daemon(place) as daemon:
        place.drop_many(range(300))
        daemon.wait_until(lambda status: status["pending"] == 300, "300 rows")
        daemon.kill()
    for file in place.inbox().iterdir():
        file.unlink()
    with Daemon(place) as daemon:
        daemon.wait_until(lambda status: status["gone"] == 300, "images that are GONE")
        assert daemon.get("/readyz")[0] == 200
        assert daemon.stop() == 0


def test_links_that_make_one_folder_two_inboxes_are_refused(tmp_path: Path) -> None:
    place = Place(tmp_path, {"inbox": [{"name": "a"}, {"name": "b", "path": "again"}]})
    (tmp_path / "again").rmdir()
    (tmp_path / "again").symlink_to(place.inbox("a"))
    for words in (("run", "--once"), ("check", "--quick")):
        refused = place.command(*words)
        assert refused.returncode == os.EX_CONFIG
        assert "are the same folder" in (refused.stdout + refused.stderr).replace("\n", " ")


def test_results_that_a_link_puts_into_an_inbox_are_refused(tmp_path: Path) -> None:
    place = Place(tmp_path, {"output": {"results": "link/results"}})
    (place.inbox() / "sub").mkdir()
    (tmp_path / "link").symlink_to(place.inbox() / "sub")
    place.drop("a.ppm", picture(1))
    refused = place.run_once()
    assert refused.returncode == os.EX_CONFIG
    assert "is inside the inbox" in refused.stderr.replace("\n", " ")
    assert not (place.inbox() / "sub" / "results").exists()
