"""How `visiond run --once` ends: complete, limited, or stopped by a signal."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import anyio
import pytest

from daemon.config.loading import parse
from daemon.monitoring.snapshot import Snapshot
from daemon.service.lifecycle import run_service
from tests.daemon_process import Daemon, Place, counts_of, picture

SLOW = {"stages": {"blip": {"options": {"latency_per_image_seconds": 0.05}}}}


def test_failed_images_are_1_and_0_where_they_are_allowed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(2))
    place.drop("broken.jpg", b"no picture")
    assert place.run_once().returncode == 1
    assert place.command("retry", "--all").returncode == 0
    run = place.command("run", "--once", "--allow-failed")
    assert (run.returncode, run.stdout.startswith("0 done, 1 failed")) == (0, True)
    place.assert_kept(DONE=2, FAILED=1)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_a_signal_cut_short_ends_as_a_shell_reports_it_even_where_failures_are_allowed(
    tmp_path: Path, signum: signal.Signals
) -> None:
    place = Place(tmp_path, SLOW)
    place.drop_many(range(1000))
    with Daemon(place, "--once", "--allow-failed") as daemon:
        daemon.wait_until(lambda status: status["done"], "work")
        daemon.signal(signum)
        assert daemon.wait_end() == 128 + signum
        assert re.search(r"^[1-9]\d* done, 0 failed, 0 skipped in ", daemon.log_text(), re.MULTILINE)
    assert counts_of(place)["PENDING"]


def test_one_that_was_stopped_before_it_had_found_every_file_has_not_done_all(tmp_path: Path) -> None:
    place = Place(tmp_path, {"inbox": [{"settle_seconds": 600.0}]})
    (place.inbox() / "growing.ppm").write_bytes(picture(1))
    with Daemon(place, "--once") as daemon:
        assert daemon.stop() == 128 + signal.SIGTERM
        assert "not every file was found" in daemon.log_text()


def test_a_trial_takes_the_highest_priority_first_and_leaves_the_rest_to_the_next_run(tmp_path: Path) -> None:
    inboxes = [
        {"name": name, "priority": priority, "settle_seconds": 0}
        for name, priority in (("low", 0), ("high", 1))
    ]
    place = Place(tmp_path, {"inbox": inboxes})
    place.drop_many(range(20), "low")
    place.drop_many(range(20, 25), "high")
    run = place.command("run", "--once", "--limit", "7")
    assert run.returncode == 0
    assert run.stdout.startswith("7 done, 0 failed")
    assert (
        "18 images are still pending because of --limit 7; `visiond run --once` continues with them."
        in run.stdout
    )
    done = "SELECT inbox.path, COUNT(*) FROM image JOIN inbox ON inbox.id = inbox WHERE status = 1 GROUP BY inbox"
    assert {Path(os.fsdecode(path)).name: count for path, count in place.rows(done)} == {
        "inbox-high": 5,
        "inbox-low": 2,
    }
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=25)


def test_in_a_trial_an_image_with_a_temporary_error_has_all_its_attempts_and_other_postponed_images_have_none(
    tmp_path: Path,
) -> None:
    place = Place(
        tmp_path,
        {"stages": {"ocr": {"options": {"fail": {"STUMBLE": "transient"}}}}, "pipeline": {"max_attempts": 3}},
    )
    for number in range(4):
        place.drop(f"{number}.ppm", picture(number, b"STUMBLE"))
    assert place.run_once().returncode == 1
    assert place.command("retry", "--all").stdout == "4 images pending again\n"
    run = place.command("run", "--once", "--limit", "2")
    assert (run.returncode, run.stdout.startswith("0 done, 2 failed")) == (1, True)
    assert counts_of(place) == {"FAILED": 2, "PENDING": 2}
    assert sorted(place.rows("SELECT status, attempts FROM image")) == [(0, 0), (0, 0), (2, 3), (2, 3)]


def test_the_progress_of_a_trial_counts_its_images_alone(tmp_path: Path) -> None:
    place = Place(tmp_path, SLOW)
    place.drop_many(range(40))
    (place.inbox() / "link").symlink_to(tmp_path)  # which ends without being taken
    shown: list[Snapshot] = []
    anyio.run(lambda: run_service(parse(place.settings, tmp_path), once=True, limit=12, show=shown.append))
    found = [snapshot for snapshot in shown if snapshot.pending + snapshot.done == 40]
    assert {snapshot.done + snapshot.left_in_this_run for snapshot in found} == {12}
    assert len({snapshot.done for snapshot in found}) > 1
    assert (found[-1].ended_in_this_run, found[-1].left_in_this_run, found[-1].pending) == (13, 0, 28)


@pytest.mark.parametrize("option", [("--limit", "3"), ("--allow-failed",), ("--once", "--limit", "0")])
def test_options_for_once_are_refused_without_it(tmp_path: Path, option: tuple[str, ...]) -> None:
    place = Place(tmp_path)
    assert place.command("run", *option).returncode == os.EX_USAGE
    assert not place.has_ledger()
