"""A full or unwritable disk pauses the daemon. It reports that once, and continues by itself.
Nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.server.client import Client, list_hidden, open_place
from tests.daemon_process import SLACK_SECONDS, Daemon, Place, picture, wait_for, with_pauses
from tests.faults.syscalls import Supervisor

RECOVERY_SECONDS = 10.0
OBSERVED_SECONDS = 2.5  # of a pause, in which it tries again at least twice


class Tmpfs:
    """A small separate file system, which can be full without harm to the machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.folder)], check=True)


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Tmpfs]:
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "visiond-test", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mount.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mount.stderr.strip()}")
    try:
        yield Tmpfs(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def assert_paused(daemon: Daemon, what: str, why: str) -> None:
    """It is paused, reports why, is alive, and blames no image."""

    def told(problems: list[str]) -> bool:
        return any(problem.startswith(f"{what} cannot be written") and why in problem for problem in problems)

    daemon.wait_until(lambda status: told(status["obstacles"]), f"a pause: {why}")
    code, ready = daemon.get("/readyz")
    assert code == 503
    assert told(ready["problems"])
    assert daemon.get("/healthz")[0] == 200
    assert daemon.status()["failed"] == 0


def assert_says_so_once(daemon: Daemon) -> None:
    """It logs little, although it tries again and again."""
    daemon.wait_event("paused")  # a thread writes the log, and the status may be ahead of it
    text, started = daemon.log_text(), time.monotonic()
    daemon.wait_until(lambda _: time.monotonic() - started > OBSERVED_SECONDS, "some tries")
    assert daemon.log_text() == text


def assert_goes_on(daemon: Daemon, images: int) -> None:
    ended = daemon.status()["ended_in_this_run"]
    daemon.wait_until(
        lambda status: status["ended_in_this_run"] > ended,
        "further endings",
        RECOVERY_SECONDS + SLACK_SECONDS,
    )
    daemon.wait_idle(images)
    wait_for(lambda: daemon.get("/readyz") == (200, {"ready": True, "problems": []}), "readiness")


def test_full_results_pause_the_daemon_until_there_is_room_and_read_only_ones_do_not_hinder_its_end(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    with mounted(place.site.results, "32k") as disk:
        with Daemon(place) as daemon:
            place.drop_many(range(100))
            assert_paused(daemon, "results", os.strerror(errno.ENOSPC))
            assert_says_so_once(daemon)
            disk.remount("size=4m")
            assert_goes_on(daemon, 100)
            disk.remount("ro")
            place.drop_many(range(100, 150))
            assert_paused(daemon, "results", os.strerror(errno.EROFS))
            assert daemon.stop(RECOVERY_SECONDS + SLACK_SECONDS) == 0
        disk.remount("rw")
        assert place.run_once().returncode == 0
        place.assert_kept(DONE=150)


@pytest.mark.parametrize("different", [1500, 1], ids=["images that are processed", "results that are reused"])
def test_publishing_limits_while_results_cannot_be_written(different: int, tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop("known.ppm", picture(0))
    with mounted(place.site.results, "32k"), Daemon(place) as daemon:
        daemon.wait_idle(1)
        for number in range(1500):  # more than may wait for it
            place.drop(f"{number}.ppm", picture(number % different))
        daemon.wait_until(lambda status: status["limit"]["part"] == "publish", "publishing that limits")
        assert daemon.metric("visiond_limited_by", part="publish") == 1


@pytest.mark.parametrize(
    ("bins", "fate"), [("none", "move"), ("none", "delete"), ("copy", "delete"), ("move", "keep")]
)
def test_images_of_an_inbox_that_is_read_only_have_results_and_leave_it_later_and_others_do_not_wait(
    tmp_path: Path, bins: str, fate: str
) -> None:
    inboxes = [
        {"name": name, "path": path, "on_success": fate}
        for name, path in (("card", "disk/inbox"), ("well", "inbox"))
    ]
    settings = {"inbox": [{"settle_seconds": 0.1} | inbox for inbox in inboxes], "output": {"bins": bins}}
    with mounted(tmp_path / "disk", "4m") as disk:
        place = Place(tmp_path, settings)
        # A rename from another file system is a copy.
        staging, place.staging = place.staging, place.inbox("card")
        place.drop_many(range(20), "card")
        place.staging = staging
        disk.remount("ro")
        assert f"{place.inbox('card')} cannot be written" in place.command("check", "--quick").stdout
        for number in range(20, 60, 20):
            # The second time, images that the first daemon did not publish come first.
            place.drop_many(range(number, number + 20), "well")
            with Daemon(place) as daemon:
                daemon.wait_until(
                    lambda status: "cannot leave its inbox" in str(status["obstacles"]), "a problem"
                )
                wait_for(lambda: not list(place.inbox("well").iterdir()), "the other inbox is empty")
                wait_for(
                    lambda due=number + 20: len(list(place.site.results.rglob("*.json"))) == due,
                    "a result for each",
                )
                assert len(list(place.inbox("card").iterdir())) == 20
                assert daemon.stop() == 0
        disk.remount("rw")
        assert place.run_once().returncode == 0
        assert not list(place.inbox("card").iterdir())
        place.assert_kept(DONE=60)


def test_images_leave_an_inbox_that_can_be_written_again_while_the_daemon_runs(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "4m") as disk:
        place = Place(
            tmp_path, {"inbox": [{"path": "disk/inbox", "settle_seconds": 0.1, "on_success": "delete"}]}
        )
        place.staging = place.inbox()
        place.drop_many(range(5))
        disk.remount("ro")
        with Daemon(
            place, environment=with_pauses({"daemon.results.publisher.PAUSE_SECONDS": 1.0})
        ) as daemon:
            daemon.wait_until(
                lambda status: "cannot leave its inbox" in str(status["obstacles"]), "a problem"
            )
            assert daemon.get("/readyz")[0] == 503
            disk.remount("rw")
            wait_for(lambda: not list(place.inbox().iterdir()), "the images leave")
            wait_for(lambda: daemon.get("/readyz")[0] == 200, "readiness")
            assert daemon.stop() == 0
        place.assert_kept(DONE=5)


def test_once_processes_everything_and_reports_a_file_that_cannot_be_moved(tmp_path: Path) -> None:
    place = Place(tmp_path, {"inbox": [{"settle_seconds": 0.1, "on_success": "move"}]})
    place.drop_many(range(10))
    moved = os.path.join(os.fsencode(place.site.done), b"00003.ppm")
    with Supervisor(tmp_path, lambda call: errno.EIO if call == ("rename", moved) else 0) as supervisor:
        run = place.run_once(supervisor=supervisor.path)
    assert run.returncode == os.EX_IOERR
    assert f"{place.inbox()}/00003.ppm: Input/output error. Its result is stored" in run.stderr
    assert [file.name for file in place.inbox().iterdir()] == ["00003.ppm"]
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=10)


def test_files_on_other_disks_than_the_results_are_flushed_before_images_are_marked_as_published(
    tmp_path: Path,
) -> None:
    with mounted(tmp_path / "disk", "4m"), mounted(tmp_path / "other", "4m"):
        place = Place(
            tmp_path, {"inbox": [{"path": "disk/inbox", "settle_seconds": 0.1, "on_success": "delete"}]}
        )
        place.staging = place.inbox()
        place.drop("sub/a.ppm", picture(0))
        place.site.results.mkdir()
        (place.site.results / "sub").symlink_to(tmp_path / "other")
        with Supervisor(tmp_path, lambda call: 0) as supervisor:
            assert place.run_once(supervisor=supervisor.path).returncode == 0
        synced = {call.path for call in supervisor.calls if call.name == "syncfs"}
        assert any(path.startswith(os.fsencode(place.inbox())) for path in synced)
        assert os.fsencode(tmp_path / "other") in synced


def test_a_full_disk_under_the_ledger_pauses_the_daemon_and_nothing_is_wrongly_reported_as_done(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    with mounted(place.folder / "state", "512k") as disk:
        with Daemon(place) as daemon:
            place.drop_many(range(600))
            assert_paused(daemon, "ledger", "full")
            assert_says_so_once(daemon)
            disk.remount("size=64m")
            assert_goes_on(daemon, 600)
            assert daemon.stop() == 0
        place.assert_kept(DONE=600)


def test_a_file_that_comes_into_the_failed_folders_place_pauses_the_daemon_until_it_is_gone(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    with Daemon(place) as daemon:
        place.site.failed.touch()
        place.drop("bad.jpg", b"no picture")
        place.drop_many(range(20))
        daemon.wait_until(lambda status: str(place.site.failed) in " ".join(status["obstacles"]), "a pause")
        place.site.failed.unlink()
        daemon.wait_idle(21)
    place.assert_kept(DONE=20, FAILED=1)


def test_a_retry_that_cannot_write_the_ledger_exits_74_and_says_so(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop("bad.jpg", b"no picture")
    assert place.run_once().returncode == 1
    log = os.fsencode(f"{place.site.ledger}-wal")
    with Supervisor(
        tmp_path, lambda call: errno.ENOSPC if call.path == log and call.name == "write" else 0
    ) as supervisor:
        refused = place.command("retry", "--all", supervisor=supervisor.path)
    assert refused.returncode == os.EX_IOERR
    assert "the room on its disk" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_once_over_an_inbox_that_cannot_be_read_exits_74_and_says_so(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(3))
    inbox = os.path.join(os.fsencode(place.inbox()), b"")
    with Supervisor(tmp_path, lambda call: errno.EIO if call.path == inbox else 0) as supervisor:
        run = place.run_once(supervisor=supervisor.path)
    assert run.returncode == os.EX_IOERR
    assert "inbox cannot be read" in run.stderr
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=3)


def test_results_that_the_system_loses_after_all_end_the_daemon_with_74_and_the_next_one_has_them_again(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    place.drop_many(range(3))
    with Supervisor(tmp_path, lambda call: errno.EIO if call.name == "syncfs" else 0) as supervisor:
        run = place.run_once(supervisor=supervisor.path)
    assert run.returncode == os.EX_IOERR
    assert "What is missing is published again at the next start." in run.stderr
    assert place.rows("SELECT status, emitted FROM image") == 3 * [(1, 0)]
    for sidecar in place.site.results.iterdir():
        sidecar.unlink()
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=3)


def test_uploads_into_a_full_or_read_only_inbox_are_refused_and_nothing_of_them_is_left(
    tmp_path: Path,
) -> None:
    data = [picture(number, bytes(1 << 20)) for number in range(2)]
    inbox = {"path": "disk/inbox", "uploads": True, "settle_seconds": 0.1}
    with mounted(tmp_path / "disk", "2m") as disk:
        place = open_place(tmp_path, {"inbox": [inbox]})
        with Daemon(place) as daemon:
            client = Client(place)
            first = client.post(data[0], "wait=30").image
            parts = [data[1][at : at + 50_000] for at in range(0, len(data[1]), 50_000)]
            unannounced = client.ask("POST", "/api/images", iter(parts), client.token, encode_chunked=True)
            for answer in (client.post(data[1]), unannounced):
                assert (answer.status, answer.headers["retry-after"]) == (429, "60")
            assert list_hidden(place) == []
            (place.inbox() / first["path"]).unlink()
            assert client.post(data[1]).status == 202
            disk.remount("ro")
            assert client.post(picture(2)).status == 503
            assert "uploads = true writes files there" in place.command("check", "--quick").stdout
            disk.remount("rw")
            assert client.post(picture(2), "wait=30").image["status"] == "DONE"
            assert daemon.stop() == 0
