"""`visiond run` from its start to its end, as systemd and users see it."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from daemon.config.loading import parse
from daemon.config.state import lock_state
from daemon.core.errors import Unfinished
from daemon.monitoring.snapshot import Snapshot
from daemon.service.lifecycle import run_service
from tests.daemon_process import (
    ON_A_TERMINAL,
    PATIENCE,
    Daemon,
    Notice,
    Place,
    counts_of,
    picture,
    wait_for,
    with_pauses,
)
from tests.faults.kill import Readings
from tests.faults.syscalls import Call, Supervisor

SLOW = {"stages": {"blip": {"options": {"latency_per_image_seconds": 0.02}}}}  # 50 images a second
WATCHDOG_SECONDS = 1.0
OFTEN = {"WATCHDOG_USEC": "150000"}  # a message every 50 ms


def test_the_daemon_reports_ready_and_drains_on_sigterm_under_load(tmp_path: Path) -> None:
    place = Place(tmp_path, SLOW)
    place.drop_many(range(400))
    with Daemon(place) as daemon:
        daemon.wait_until(lambda status: status["done"] > 10, "work")
        assert daemon.stop() == 0
        assert list(daemon.events("stopped"))  # it was not cut short by drain_seconds
        ready = datetime.fromisoformat(next(daemon.events("ready"))["timestamp"]).timestamp()
        texts = [notice.text for notice in daemon.notify.notices]
    counts = counts_of(place)
    assert counts["DONE"] > 10
    assert counts["PENDING"] > 10  # it was under load, and did not process everything first
    assert counts["FAILED"] == 0
    assert place.judge(finished=False).problems == []  # nothing half done
    assert place.rows("SELECT MIN(finished_at) FROM image")[0][0] > ready
    assert texts.index("READY=1") < texts.index("STOPPING=1")
    assert any(text.startswith("STATUS=") and "done" in text for text in texts)
    place.configure({"stages": {"blip": {"options": {"latency_per_image_seconds": 0}}}})
    assert place.run_once().returncode == 0  # all that was left is done
    place.assert_kept(DONE=400)


def test_a_drain_reads_no_more_files(tmp_path: Path) -> None:
    place = Place(tmp_path, SLOW)
    place.drop_many(range(600))
    readings = Readings(place)
    with Daemon(place, environment=with_pauses({"daemon.workers.batcher.QUEUE_IMAGES": 8})) as daemon:
        daemon.wait_until(lambda status: status["done"] > 10, "work")
        assert daemon.stop() == 0
    readings.count()
    assert 10 < readings.times.total() < 400


def test_a_run_once_that_is_stopped_is_not_taken_for_one_that_did_all(tmp_path: Path) -> None:
    place = Place(tmp_path, SLOW)
    place.drop_many(range(200))

    told: list[int] = []

    def stop(snapshot: Snapshot) -> None:
        if snapshot.done > 10 and not told:
            told.append(snapshot.pending)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Unfinished, match=r"images are still pending; `visiond run --once") as end:
        anyio.run(lambda: run_service(parse(place.settings, tmp_path), once=True, show=stop))
    assert told[0] > 10
    assert end.value.exit_status == 128 + signal.SIGTERM
    assert place.judge(finished=False).problems == []


def test_files_are_admitted_while_the_models_load_and_ready_follows_afterwards(tmp_path: Path) -> None:
    place = Place(tmp_path, {"stages": {"clip": {"options": {"load_seconds": 60.0}}}})
    place.drop_many(range(20))
    with Daemon(place, ready=False, environment=OFTEN) as daemon:
        told = "STATUS=0 done, 0 failed, 0 skipped, 20 pending, loading models: ocr, yolo loaded; clip, blip to go"
        daemon.wait_notice(told)
        daemon.wait_event("model loaded", stage="yolo")
        assert "loading: ocr, yolo loaded; clip, blip to go" in place.command("status").stdout
        assert "READY=1" not in [notice.text for notice in daemon.notify.notices]
        assert place.command("status").stdout.startswith(told.removeprefix("STATUS="))
        assert daemon.stop() == 0
    assert counts_of(place) == {"PENDING": 20}
    place.configure({"stages": {"clip": {"options": {"load_seconds": 0}}}})
    run = place.run_once()
    assert "loading models: " in run.stderr
    assert run.stdout.startswith("20 done, 0 failed, 0 skipped in ")
    assert f"results are in {place.site.results}" in run.stdout
    place.assert_kept(DONE=20)


def test_a_failed_file_that_was_replaced_and_done_is_no_longer_counted_as_failed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop("a.ppm", b"no picture")
    place.drop("b.ppm", b"no picture either")
    with Daemon(place) as daemon:
        daemon.wait_idle(2)
        place.drop("a.ppm", picture(1))
        assert daemon.wait_idle(3)["failed"] == 1
        assert daemon.stop() == 0
    assert place.command("status").stdout.startswith("1 done, 1 failed")
    place.assert_kept(DONE=1, FAILED=2)


def test_a_second_daemon_on_the_same_state_exits_75_at_once_and_the_first_is_unharmed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with Daemon(place) as daemon:
        cost, second = cost_of(place, "run")
        assert second.returncode == os.EX_TEMPFAIL
        assert (
            f"Another visiond is using {tmp_path / 'state'} (process {daemon.process.pid}). Stop it"
            in second.stderr
        )
        assert 0.1 < cost < 1.5  # 0.4 s; with torch it would be three
        place.drop_many(range(10))
        daemon.wait_idle(10)
        os.killpg(daemon.process.pid, signal.SIGINT)  # Ctrl-C, as a terminal sends it: to the workers too
        assert daemon.wait_end() == 0
        daemon.wait_event("stopped", ended=10, pending=0)
    place.assert_kept(DONE=10)


def cost_of(place: Place, *arguments: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Seconds of processor time, as other programs may keep the machine busy. `env` prevents a fork: a forked
    command has its imports already, and is no child of this process."""
    before = os.times()
    done = place.command(*arguments, prefix=["env"])
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system, done


def test_a_retry_is_refused_while_another_process_has_the_state_and_does_not_answer_yet(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    place.drop("bad.jpg", b"no picture")
    place.run_once()
    with lock_state(tmp_path / "state"):
        refused = place.command("retry", "--all")
    assert refused.returncode == os.EX_TEMPFAIL
    assert counts_of(place) == {"FAILED": 1}


def test_a_second_ctrl_c_does_not_wait_for_images_in_flight(tmp_path: Path) -> None:
    device = tmp_path / "device"  # which a worker makes when it begins
    slow = {"latency_seconds": 600.0, "device_file": str(device)}
    place = Place(tmp_path, {"stages": {"blip": {"options": slow}}, "pipeline": {"drain_seconds": 600.0}})
    with Daemon(place) as daemon:
        place.drop("a.ppm", picture(1))
        wait_for(device.exists, "an image in a worker's hands")
        os.killpg(daemon.process.pid, signal.SIGINT)
        daemon.wait_event("draining", in_flight=1)
        os.killpg(daemon.process.pid, signal.SIGINT)
        daemon.wait_end()
    assert counts_of(place) == {"PENDING": 1}


@pytest.mark.parametrize("once", [[], ["--once"]], ids=["run", "run --once"])
def test_closing_the_terminal_drains_the_daemon_although_the_signal_comes_twice_and_also_to_the_workers(
    tmp_path: Path, once: list[str]
) -> None:
    device = tmp_path / "device"  # which a worker makes when it begins
    slow = {"latency_seconds": 1.0, "device_file": str(device)}
    place = Place(tmp_path, {"stages": {"blip": {"options": slow}}})
    place.drop_many(range(200))
    with Daemon(place, *once, prefix=ON_A_TERMINAL) as daemon:
        wait_for(device.exists, "images in a worker's hands")
        os.killpg(daemon.process.pid, signal.SIGHUP)
        daemon.wait_event("draining", signal="SIGHUP")
        os.killpg(daemon.process.pid, signal.SIGHUP)
        assert daemon.wait_end() == (128 + signal.SIGHUP if once else 0)  # images are left
        assert not list(daemon.events("worker lost"))
        assert not list(daemon.events("stopped before the drain was finished; images in flight stay pending"))
    assert counts_of(place)["DONE"]
    assert place.judge(finished=False).problems == []


def test_under_nohup_closing_the_terminal_does_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with Daemon(place, prefix=["nohup"]) as daemon:
        os.killpg(daemon.process.pid, signal.SIGHUP)
        place.drop_many(range(10))
        daemon.wait_idle(10)
        assert daemon.stop() == 0
    place.assert_kept(DONE=10)


def test_a_thread_that_hangs_in_a_system_call_does_not_delay_the_exit(tmp_path: Path) -> None:
    place = Place(tmp_path, {"pipeline": {"drain_seconds": 1.0}})
    with Daemon(place, environment=hang_system_calls(tmp_path, place.site.results / "stuck")) as daemon:
        place.drop("stuck/a.ppm", picture(2))
        # An image that no worker has begun would be released; this one goes on to its publication.
        wait_for(lambda: counts_of(place) == {"DONE": 1}, "a result that has to be published")
        assert daemon.stop() == 0
        daemon.wait_event(
            "a thread hangs in a system call, perhaps on a dead mount; the daemon exits without waiting for it; nothing is lost"
        )
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=1)


@pytest.mark.parametrize(
    ("nth", "status", "said"), [(1, os.EX_IOERR, "cannot create the socket"), (2, os.EX_OK, "")]
)
def test_a_control_socket_that_cannot_be_removed_is_reported_at_the_start_and_ignored_at_the_end(
    tmp_path: Path, nth: int, status: int, said: str
) -> None:
    place = Place(tmp_path)
    removal = Call("unlink", os.fsencode(tmp_path / "state" / "control.sock"))
    with Supervisor(
        tmp_path, lambda call: errno.EIO if call == removal and seen.count(removal) == nth else 0
    ) as supervisor:
        seen = supervisor.calls
        run = place.run_once(supervisor=supervisor.path)
    assert run.returncode == status
    assert said in run.stderr
    assert "Traceback" not in run.stderr


def test_all_problems_of_the_configuration_are_reported_at_once_with_78(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.configure(
        {"pipeline": {"max_atempts": 3, "slab_bytes": "1 XB"}, "stages": {"ocr": {"batch_size": -1}}}
    )
    run = place.run_once()
    assert run.returncode == os.EX_CONFIG
    assert 'pipeline.max_atempts: unknown key; did you mean "max_attempts"?' in run.stderr
    assert "pipeline.slab_bytes" in run.stderr
    assert "stages.ocr.batch_size" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_missing_inbox_is_named_with_78_and_not_created(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.inbox().rmdir()
    run = place.run_once()
    assert run.returncode == os.EX_CONFIG
    assert f"inbox {place.inbox()} does not exist; create it" in run.stderr
    # and nothing else is, either
    assert sorted(path.name for path in tmp_path.iterdir()) == ["daemon.toml", "staging"]
    place.inbox().mkdir()
    assert place.run_once().returncode == 0
    place.inbox().rmdir()
    assert f"inbox {place.inbox()} does not exist; create it" in place.run_once().stderr


def test_an_inbox_that_goes_missing_is_in_the_status_until_it_is_back(tmp_path: Path) -> None:
    place = Place(tmp_path)
    told = (
        f"inbox {place.inbox()} cannot be read: {place.inbox()} is gone. Mount it or move it back, and work goes on; "
        "if that is on purpose, make a new one, and restart the daemon"
    )
    with Daemon(place) as daemon:
        place.inbox().rename(tmp_path / "elsewhere")
        daemon.wait_until(lambda status: status["obstacles"] == [told], "word of it")
        assert place.command("status").stdout.splitlines()[0].endswith(f"; {told}")
        assert json.loads(place.command("status", "--json").stdout)["obstacles"] == [told]
        (tmp_path / "elsewhere").rename(place.inbox())
        daemon.wait_until(lambda status: not status["obstacles"], "the end of it")


def test_an_inbox_whose_mount_is_dead_at_the_start_delays_no_other_and_is_processed_once_it_answers(
    tmp_path: Path,
) -> None:
    inboxes = [
        {"name": "dead", "priority": 1, "on_success": "move", "settle_seconds": 0},
        {"name": "live", "settle_seconds": 0},
    ]
    place = Place(tmp_path, {"inbox": inboxes, "stages": {"clip": {"options": {"load_seconds": 60.0}}}})
    place.drop_many(range(3), "dead")
    with Daemon(place, ready=False, environment=OFTEN) as daemon:
        # so that there are rows, which the next one would read first
        daemon.wait_notice(
            "STATUS=0 done, 0 failed, 0 skipped, 3 pending, loading models: ocr, yolo loaded; clip, blip to go"
        )
    place.configure({"stages": {"clip": {"options": {"load_seconds": 0}}}})
    environment = hang_system_calls(tmp_path, place.inbox("dead"))
    place.drop("late.ppm", picture(3), "dead")
    place.drop_many(range(4, 9), "live")
    with Daemon(place, environment=environment) as daemon:
        daemon.wait_event("inbox does not answer; its mount may be dead; other inboxes are processed")
        daemon.wait_until(lambda status: status["done"] == 5, "the images of the other inbox")
        told = f"inbox {place.inbox('dead')} has not answered for "
        daemon.wait_until(
            lambda status: any(line.startswith(told) for line in status["obstacles"]), "word of it"
        )
        assert counts_of(place) == {"PENDING": 3, "DONE": 5}
        assert f"{place.inbox('dead')} does not answer; is its mount dead?" in check_with(place, environment)
        (tmp_path / "hanging").unlink()
        daemon.wait_idle(9)
        wait_for(lambda: daemon.get("/readyz") == (200, {"ready": True, "problems": []}), "readiness")
        assert daemon.stop() == 0
    place.assert_kept(DONE=9)


def test_once_does_not_wait_for_a_dead_mount_and_says_so_once(tmp_path: Path) -> None:
    place = Place(
        tmp_path, {"inbox": [{"name": "dead", "settle_seconds": 0}, {"name": "live", "settle_seconds": 0}]}
    )
    place.drop_many(range(3), "live")
    environment = hang_system_calls(tmp_path, place.inbox("dead"))
    for done in (3, 0):  # the first start, and a later one
        run = place.run_once(prefix=["env", *(f"{name}={value}" for name, value in environment.items())])
        assert run.returncode == os.EX_IOERR
        assert f"{place.inbox('dead')} has not answered" in run.stderr
        assert run.stderr.count("inbox does not answer; its mount may be dead") == 1
        assert run.stdout.startswith(f"{done} done, 0 failed, 0 skipped in ")
        assert counts_of(place) == {"DONE": 3}


HANG = """
import os, time
from daemon import cli
from daemon.system import mounts
mounts.ANSWER_SECONDS, cli.LEAVE_SECONDS = 1.0, 0.5
there = os.access
def hanging(call):
    def wait(path=".", *arguments, **options):
        while FOLDER in str(path) and there(MARKER, os.F_OK):
            time.sleep(0.05)
        return call(path, *arguments, **options)
    return wait
for name in ("stat", "lstat", "scandir", "open", "access", "rename", "unlink"):
    setattr(os, name, hanging(getattr(os, name)))
"""


def hang_system_calls(at: Path, folder: Path) -> dict[str, str]:
    """An environment in which every access to the folder hangs, as on a dead mount,
    while a file `hanging` exists at `at`. The waits for it are shorter than a user's."""
    marker = at / "hanging"
    marker.touch()
    program = HANG.replace("FOLDER", repr(str(folder))).replace("MARKER", repr(str(marker)))
    (at / "sitecustomize.py").write_text(program)
    return {"PYTHONPATH": str(at)}


def check_with(place: Place, environment: dict[str, str]) -> str:
    return place.command(
        "check", "--quick", prefix=["env", *(f"{name}={value}" for name, value in environment.items())]
    ).stdout


def test_the_watchdog_is_fed_while_idle_and_through_a_hanging_worker_but_not_when_nothing_moves(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, {"pipeline": {"batch_timeout_seconds": 0.4}})
    place.configure({"stages": {"ocr": {"options": {"fail": {"HANG": "hang"}}}}})
    with Daemon(
        place, environment=OFTEN | hang_system_calls(tmp_path, place.site.results / "stuck")
    ) as daemon:
        assert daemon.notify.wait(lambda notices: fed(notices) >= 5, PATIENCE, daemon.alive), (
            "idle, it is fed"
        )
        place.drop("hang.ppm", picture(1, b"HANG"))
        daemon.wait_event("image failed", reason="timeout")
        daemon.notify.catch_up()
        assert fed_while_hanging(daemon) >= 4, "a worker that hangs is the pool's business"
        place.drop("stuck/a.ppm", picture(2))
        begun = len(daemon.notify.notices)
        stuck = daemon.notify.wait(
            lambda notices: longest_silence(notices[begun:]) >= 10, PATIENCE, daemon.alive
        )
        assert stuck, "stuck, it is not fed"


def test_the_watchdog_is_fed_while_a_backlog_is_answered_from_the_ledger_and_no_worker_moves(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    place.drop("original.ppm", picture(1))
    assert place.run_once().returncode == 0
    place.configure({"pipeline": {"batch_timeout_seconds": 0.2}})  # so that silence of 0.4 s is a stall
    for number in range(1500):
        place.drop(f"{number}.ppm", picture(1))
    with Daemon(place, environment=OFTEN) as daemon:
        daemon.wait_idle(1500)
        daemon.notify.catch_up()
        assert longest_silence_amid_progress(daemon.notify.notices) < 3
        assert daemon.metric("visiond_stage_images_total", stage="ocr") == 0


def test_the_watchdog_is_not_fed_while_the_event_loop_is_blocked(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with Daemon(place, environment=OFTEN) as daemon:
        assert daemon.notify.wait(lambda notices: fed(notices) >= 3, PATIENCE, daemon.alive)
        daemon.pause()  # what blocks the loop does not matter: here it is all threads
        stopped = daemon.notify.catch_up()
        assert not daemon.notify.wait(lambda notices: len(notices) > stopped, WATCHDOG_SECONDS, daemon.alive)
        daemon.signal(signal.SIGCONT)
        assert daemon.notify.wait(lambda notices: fed(notices[stopped:]) >= 3, PATIENCE, daemon.alive)


def fed(notices: list[Notice]) -> int:
    return sum(notice.text == "WATCHDOG=1" for notice in notices)


def longest_silence(notices: list[Notice]) -> int:
    """The largest number of status messages in a row without feeding the watchdog, from READY on."""
    longest = silent = 0
    for notice in notices:
        silent = 0 if notice.text == "WATCHDOG=1" else silent + notice.text.startswith("STATUS=")
        longest = max(longest, silent)
    return longest


def longest_silence_amid_progress(notices: list[Notice]) -> int:
    """The same, counting only messages with more DONE images
    than the last one: a machine that stands still sends none."""
    longest = silent = 0
    before, is_fed = "", False
    for notice in notices:
        is_fed = is_fed or notice.text == "WATCHDOG=1"
        if notice.text.startswith("STATUS="):
            done = notice.text.partition(" done")[0]
            silent = 0 if is_fed else silent + (done != before)
            longest, before, is_fed = max(longest, silent), done, False
    return longest


def fed_while_hanging(daemon: Daemon) -> int:
    """How often the watchdog was fed between the start and the
    loss of those workers that had the hanging image alone."""
    spans = [
        [datetime.fromisoformat(entry["timestamp"]).timestamp() for entry in daemon.events(event)]
        for event in ("worker ready", "worker lost")
    ]
    return sum(
        fed([notice for notice in daemon.notify.notices if ready < notice.at < lost])
        for ready, lost in list(zip(*spans, strict=False))[1:]
    )


def test_a_notify_socket_that_nobody_reads_does_not_stop_the_work(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        environment: dict[str, Any] = {"NOTIFY_SOCKET": str(tmp_path / "deaf"), "WATCHDOG_USEC": "3000"}
        with Daemon(place, ready=False, environment=environment) as daemon:
            daemon.wait_event("ready")
            place.drop_many(range(10))
            daemon.wait_idle(10)
            assert daemon.stop() == 0
    place.assert_kept(DONE=10)
