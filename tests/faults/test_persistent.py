from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.daemon_process import Place, counts_of, with_pauses
from tests.faults.persistent import Fault, Trial
from tests.faults.syscalls import Call, Supervisor

# Between two tries with the images of an inbox, and with a source that did not leave it; users wait for five.
PAUSES = {"daemon.pipeline.schedule.REST_SECONDS": 1.0, "daemon.results.publisher.PAUSE_SECONDS": 1.0}


def test_a_call_that_keeps_failing_is_retried_and_reported_once(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    trial.run(iter([Fault("results", "write", "ENOSPC"), Fault("state", "fsync", "EIO")]))
    assert trial.tally.problems == []
    assert trial.tally.endings == {"waited and went on": 2}


def test_a_mount_that_goes_away_for_a_while_fails_no_image_and_leaves_no_source_behind(
    tmp_path: Path,
) -> None:
    trial = Trial(tmp_path, **with_pauses(PAUSES))
    trial.run(iter([Fault("inbox-", "open", "ENOTCONN"), Fault("done", "rename", "ETIMEDOUT")]))
    assert trial.tally.problems == []
    assert trial.tally.endings == {"waited and went on": 2}


def test_a_folder_that_cannot_be_opened_for_its_flush_pauses_the_daemon(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(3))
    folder, struck = bytes(place.site.results), list[Call]()

    def fail_twice(call: Call) -> int:
        if (
            call.name == "open"
            and call.path == folder
            and len(struck) < 2
            and any(place.site.results.glob("*.json"))
        ):
            struck.append(call)
            return errno.EIO
        return 0

    with Supervisor(tmp_path, fail_twice) as supervisor:
        run = place.run_once(supervisor=supervisor.path)
    assert run.returncode == 0, run.stderr
    assert len(struck) == 2
    assert run.stderr.count('"event": "paused"') == 1
    place.assert_kept(DONE=3)


def test_once_ends_when_the_folder_of_results_cannot_be_made_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in with_pauses({"daemon.service.lifecycle.UNWRITABLE_SECONDS": 1}).items():
        monkeypatch.setenv(name, value)
    place = Place(tmp_path)
    place.drop_many(range(3))
    folder = bytes(place.site.results)
    with Supervisor(
        tmp_path, lambda call: errno.EDQUOT if call.name == "mkdir" and call.path == folder else 0
    ) as supervisor:
        run = place.run_once(supervisor=supervisor.path)
    assert run.returncode == os.EX_IOERR, run.stderr
    assert f"results cannot be written: [Errno {errno.EDQUOT}]" in run.stderr.splitlines()[-1]
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=3)


def test_once_ends_when_the_images_of_an_inbox_cannot_be_read_for_long_and_leaves_them_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in with_pauses(PAUSES).items():
        monkeypatch.setenv(name, value)
    place = Place(tmp_path, {"pipeline": {"retry_seconds": 0.1}})
    place.drop_many(range(3))
    image = bytes(place.inbox()) + b"/"

    def away(call: Call) -> int:
        return (
            errno.ENOTCONN
            if call.name == "open" and call.path.startswith(image) and call.path.endswith(b".ppm")
            else 0
        )

    with Supervisor(tmp_path, away) as supervisor:
        run = place.run_once(supervisor=supervisor.path)
    assert run.returncode == os.EX_IOERR
    assert (
        f"images of inbox {place.inbox()} wait, as they cannot be read: {os.strerror(errno.ENOTCONN)}"
        in run.stderr
    )
    assert run.stderr.count("images of an inbox cannot be read; they wait") == 1
    assert counts_of(place) == {"PENDING": 3}
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=3)
