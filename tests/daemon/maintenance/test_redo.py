"""Processes finished images again with real processes and another configuration."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from daemon.config.state import CONTROL, lock_state, socket_address
from tests.daemon_process import STAGES, Daemon, Place, counts_of, picture, wait_for

NO_MODEL = {name: {"options": {"fail": {"": "raise"}}} for name in STAGES}  # every call of a model fails
NO_TEXT = {"text_boxes_threshold": 100}
ANY_TEXT = {"text_boxes_threshold": 0}
NO_DAEMON = "No daemon is running: `visiond run` processes what is pending.\n"


def annotated(folder: Path, images: int = 6, **settings: Any) -> Place:
    place = Place(folder, {"binning": NO_TEXT} | settings)
    place.drop_many(range(images))
    assert place.run_once().returncode == 0
    return place


def redo(place: Place, *arguments: str | Path) -> tuple[str, str]:
    """What the command prints, on both outputs."""
    done = place.command("redo", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def verified(place: Place) -> Mapping[str, int]:
    done = place.command("verify", "--json")
    assert done.returncode == 0, done.stdout
    counts: dict[str, int] = json.loads(done.stdout)["counts"]
    return counts


def bins(place: Place) -> dict[str, str]:
    return {file.name: file.parent.name for file in place.site.bins.rglob("*.ppm")}


@pytest.mark.parametrize("mode", ["move", "link", "copy"])
def test_a_changed_threshold_brings_images_into_their_new_bins_and_no_model_runs(
    tmp_path: Path, mode: str
) -> None:
    place = annotated(tmp_path, output={"bins": mode, "sinks": ["jsonl"]})
    before = bins(place)
    assert "A" not in before.values()
    place.configure({"binning": ANY_TEXT, "stages": NO_MODEL})
    assert place.run_once().stdout.startswith("0 done")
    assert redo(place, "--stale") == ("6 images pending again\n", NO_DAEMON)
    assert verified(place) == {"whole": 6}
    assert place.run_once().returncode == 0
    texts = {name: place.sidecar(name)["ocr"]["count"] for name in before}
    assert bins(place) == {name: "A" if texts[name] else before[name] for name in before} != before
    place.assert_kept(DONE=6)
    assert verified(place) == {"whole": 6}
    appended = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {record["id"]: record["bin"]["name"] for record in appended[6:]} == {
        place.sidecar(name)["id"]: bin for name, bin in bins(place).items()
    }
    assert redo(place, "--stale") == ("0 images pending again\n", "")


def test_a_changed_model_is_reported_and_only_its_stage_runs_again(tmp_path: Path) -> None:
    place = annotated(tmp_path)
    before = [place.sidecar(f"{number:05d}.ppm")["models"] for number in range(6)]
    others = {name: settings for name, settings in NO_MODEL.items() if name != "clip"}
    place.configure({"stages": others | {"clip": {"dtype": "float16"}}})
    idle = place.run_once()
    assert idle.stdout.startswith("0 done")
    told = "6 files have results of earlier models or options. "
    told += "To process those whose files still exist again: `visiond redo --stale`"
    assert told in idle.stdout.splitlines()
    assert told in place.command("status").stdout.splitlines()
    assert json.loads(place.command("status", "--json").stdout)["outdated"] == {"files": 6, "at_least": False}
    assert redo(place, "--stale") == ("6 images pending again\n", NO_DAEMON)
    assert place.run_once().stdout.startswith("6 done")
    after = [place.sidecar(f"{number:05d}.ppm")["models"] for number in range(6)]
    assert [
        {stage for stage in STAGES if old[stage] != new[stage]}
        for old, new in zip(before, after, strict=True)
    ] == [{"clip"}] * 6
    for command in (("run", "--once"), ("status",)):
        done = place.command(*command)
        assert "visiond redo" not in done.stdout + done.stderr
    place.assert_kept(DONE=6)


def test_a_daemon_counts_the_results_of_earlier_models_until_they_are_queued_again(tmp_path: Path) -> None:
    place = annotated(tmp_path, 2, http={"listen": "127.0.0.1:0"})
    place.configure({"stages": {"clip": {"dtype": "float16"}}})
    with Daemon(place) as daemon:
        daemon.wait_event("files have results of earlier models or options", files=2)
        assert json.loads(daemon.fetch("/api/status")[1])["outdated"] == {"files": 2, "at_least": False}
        assert "2 files have results of earlier models" in place.command("status").stdout
        assert redo(place, "--stale") == ("2 images pending again\n", "")
        assert "earlier models" not in place.command("status").stdout
        assert daemon.stop() == 0


@pytest.mark.parametrize("runs", [True, False], ids=["daemon", "no daemon"])
def test_images_that_a_redo_finds_gone_are_no_longer_counted_as_outdated(tmp_path: Path, runs: bool) -> None:
    place = annotated(tmp_path, 1)
    (folder := place.inbox() / "sub").mkdir()
    place.drop("sub/a.ppm", picture(7))
    assert place.run_once().returncode == 0
    place.configure({"stages": {"clip": {"dtype": "float16"}}})
    folder.rename(aside := tmp_path / "aside")

    def outdated() -> int:
        return int(json.loads(place.command("status", "--json").stdout)["outdated"]["files"])

    with Daemon(place) if runs else contextlib.nullcontext():
        if not runs:
            assert place.run_once().returncode == 0
        assert outdated() == 2
        assert redo(place, "--stale")[1] == (not runs) * NO_DAEMON + "1 image not queued: the file is gone.\n"
        if not runs:
            assert place.run_once().returncode == 0
        wait_for(lambda: outdated() == 0, "the end of the redo")
    aside.rename(folder)
    assert redo(place, "--stale") == ("1 image pending again\n", NO_DAEMON)
    assert place.rows("SELECT count(*) FROM lost") == [(0,)], "its file is back"


def test_images_that_were_deleted_when_they_were_done_are_not_outdated(tmp_path: Path) -> None:
    tables: list[dict[str, Any]] = [
        {"name": name, "on_success": name, "settle_seconds": 0.1} for name in ("delete", "keep")
    ]
    place = Place(tmp_path, {"inbox": tables})
    for number, table in enumerate(tables):
        place.drop_many(range(2 + number), table["name"])
    assert place.run_once().returncode == 0
    place.configure({"stages": {"clip": {"dtype": "float16"}}})
    assert "3 files have results of earlier models" in place.run_once().stdout
    place.settings["inbox"].pop()
    place.configure()
    for command in (("run", "--once"), ("status",)):
        assert "earlier models" not in place.command(*command).stdout


def test_images_whose_file_is_gone_or_replaced_stay_as_they_are_and_are_counted(tmp_path: Path) -> None:
    tables: list[dict[str, Any]] = [
        {"name": name, "on_success": name, "settle_seconds": 0.1} for name in ("delete", "move", "keep")
    ]
    place = Place(tmp_path, {"inbox": tables, "binning": NO_TEXT})
    for table in tables:
        place.drop_many(range(2), table["name"])
    assert place.run_once().returncode == 0
    (place.site.done / "move" / "00000.ppm").write_bytes(picture(0) + b"edited")
    place.settings["inbox"].pop()
    place.configure()
    printed, left = redo(place, "--all")
    assert printed == "1 image pending again\n"
    assert sorted(left.splitlines()) == [
        "1 image not queued: the file has changed since it was processed.",
        "2 images not queued: the file is gone.",
        "2 images not queued: the inbox is not in the configuration.",
        NO_DAEMON.strip(),
    ]
    assert counts_of(place) == {"DONE": 5, "PENDING": 1}


def test_a_running_daemon_processes_images_again_and_its_counts_stay_right(tmp_path: Path) -> None:
    place = Place(tmp_path, {"inbox": [{"on_success": "move", "settle_seconds": 0.1}]})
    place.drop_many(range(3))
    with Daemon(place) as daemon:
        daemon.wait_idle(3)
        assert redo(place, place.inbox() / "00000.ppm", "00001.ppm", "00000.ppm") == (
            "2 images pending again\n",
            "",
        )
        status = daemon.wait_idle(5)
        assert (status["done"], status["pending"], status["failed"]) == (3, 0, 0)
        assert daemon.metric("visiond_reused_results_total", stage="blip") == 2
        assert daemon.metric("visiond_image_wait_seconds_count") == 3
        assert daemon.stop() == 0
    place.assert_kept(DONE=3)
    assert verified(place) == {"whole": 3}


def test_stale_images_and_a_daemon_with_older_settings_are_reported(tmp_path: Path) -> None:
    place = annotated(tmp_path)
    with Daemon(place) as daemon:
        assert redo(place, "--stale") == ("0 images pending again\n", "")
        place.configure({"binning": ANY_TEXT})
        printed, reported = redo(place, "--stale")
        assert printed != "0 images pending again\n"
        assert reported == (
            "The running daemon has other models, thresholds or rules than this configuration has now, so these images will be "
            "as stale as before: restart it, then run `visiond redo --stale` again.\n"
        )
        assert daemon.stop() == 0
    with Daemon(place) as daemon:
        assert redo(place, "--stale")[1] == ""
        assert daemon.stop() == 0


def test_a_file_that_goes_before_it_is_read_once_more_leaves_its_result(tmp_path: Path) -> None:
    place = annotated(tmp_path, 2)
    before = place.sidecar("00000.ppm")
    redo(place, "--all")
    (place.inbox() / "00000.ppm").unlink()
    place.drop("00001.ppm", picture(9))
    with Daemon(place) as daemon:
        status = daemon.wait_idle(1)
        assert (status["done"], status["gone"], status["pending"]) == (3, 0, 0)
        assert daemon.stop() == 0
    assert place.sidecar("00000.ppm") == before
    assert verified(place) == {"whole": 2}
    assert place.judge(deleted=frozenset([b"00000.ppm"])).problems == []


def test_an_image_that_fails_in_a_redo_is_failed_and_keeps_its_sidecar_until_another_replaces_it(
    tmp_path: Path,
) -> None:
    place = annotated(
        tmp_path, 1, inbox=[{"on_success": "move", "settle_seconds": 0.1}], pipeline={"reuse_results": False}
    )
    place.drop("00000.ppm", picture(1))  # so that there is an older result too, whose sidecar it replaced
    assert place.run_once().returncode == 0
    before = place.sidecar("00000.ppm")
    place.configure({"stages": {"clip": {"options": {"fail": {"": "error"}}}}})
    redo(place, "00000.ppm")
    assert verified(place) == {"whole": 1}
    assert place.run_once().returncode == 1
    assert counts_of(place) == {"DONE": 1, "FAILED": 1}
    assert verified(place) == {"whole": 1}
    assert place.sidecar("00000.ppm") == before
    place.configure({"stages": {"clip": {"options": {"fail": {"": "transient"}}}}})
    assert place.command("retry", "--all").stdout == "1 image pending again\n"
    assert verified(place) == {}
    del place.settings["stages"]["clip"]["options"]
    place.configure()
    assert place.run_once().returncode == 0
    assert verified(place) == {"whole": 1}
    assert place.sidecar("00000.ppm")["finished_at"] > before["finished_at"]


def test_verify_says_that_the_folder_of_the_results_is_gone(tmp_path: Path) -> None:
    place = annotated(tmp_path, 1)
    place.site.results.rename(tmp_path / "elsewhere")
    done = place.command("verify")
    assert done.returncode == 1
    assert f"{place.site.results} is gone. Mount it" in done.stderr.replace("\n", " ")


def test_sidecars_of_images_that_wait_for_a_new_result_are_verified_and_repaired(tmp_path: Path) -> None:
    place = annotated(tmp_path, 5)
    whole = [(place.site.results / f"{number:05d}.ppm.json").read_bytes() for number in range(5)]
    redo(place, "--all")
    (place.site.results / "00000.ppm.json").unlink()
    (place.site.results / "00001.ppm.json").write_text("{}")
    # A damaged result, or one that cannot be read, is not compared.
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection:
        connection.execute("UPDATE image SET bin = 'X' WHERE path = CAST('00002.ppm' AS BLOB)")
        connection.execute("UPDATE image SET models = '[1,' WHERE path = CAST('00003.ppm' AS BLOB)")
        connection.commit()
    checked = json.loads(place.command("verify", "--json").stdout)
    assert checked["counts"] == {"missing": 1, "edited": 1, "whole": 1}
    assert place.command("repair").returncode == 0
    assert verified(place) == {"whole": 3}
    assert whole == [(place.site.results / f"{number:05d}.ppm.json").read_bytes() for number in range(5)]
    assert place.run_once().returncode == 0
    assert verified(place) == {"whole": 5}


def test_a_kill_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    slow = {name: {"options": {"latency_per_image_seconds": 0.05}} for name in STAGES}
    place = annotated(tmp_path, 20, output={"bins": "move"}, pipeline={"reuse_results": False})
    place.configure({"binning": ANY_TEXT, "stages": slow | {"ocr": {"batch_size": 2}}})
    redo(place, "--all")
    with Daemon(place) as daemon:
        daemon.wait_until(lambda status: status["ended_in_this_run"] >= 2, "two images done again")
        daemon.kill(group=True)
    assert counts_of(place)["DONE"] + counts_of(place)["PENDING"] == 20
    verified(place)
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=20)
    assert verified(place) == {"whole": 20}


def test_an_image_that_lies_in_a_bin_is_not_replaced_by_a_link_to_itself(tmp_path: Path) -> None:
    place = annotated(tmp_path, 1, output={"bins": "move"})
    place.configure({"output": {"bins": "link"}})
    printed, left = redo(place, "--all")
    assert printed == "0 images pending again\n"
    assert 'the file is in a bin, and bins = "link" moves no image' in left


def test_with_a_rebuilt_ledger_images_are_processed_again_where_they_are(tmp_path: Path) -> None:
    place = annotated(tmp_path, 2, output={"bins": "move"})
    shutil.rmtree(tmp_path / "state")
    assert place.command("repair").returncode == 0
    place.configure({"binning": ANY_TEXT, "stages": NO_MODEL})
    assert redo(place, "--stale")[0] == "2 images pending again\n"
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=2)


def test_images_that_a_new_rule_fails_stay_and_the_reason_is_one_line(tmp_path: Path) -> None:
    place = annotated(tmp_path, 3)
    (tmp_path / "rules.py").write_text("def choose(record):\n    return record['no such key']\n")
    place.configure({"binning": {"rules": "rules:choose"}})
    done = place.command("redo", "--stale", modules=tmp_path)
    assert (done.returncode, done.stdout) == (0, "0 images pending again\n")
    assert done.stderr.startswith(
        "3 images not queued: it would fail: rule: KeyError: 'no such key' (rules.py, line 2)"
    )
    assert done.stderr.count("\n") == 1
    place.assert_kept(DONE=3)


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        ([], os.EX_USAGE, "exactly one of"),
        (["--all", "--stale"], os.EX_USAGE, "exactly one of"),
        (["no such"], os.EX_NOINPUT, "There is no image"),
        (["broken.jpg"], os.EX_NOINPUT, "is FAILED, not DONE"),
    ],
)
def test_an_image_that_is_not_done_is_refused(
    tmp_path: Path, arguments: list[str], status: int, word: str
) -> None:
    place = Place(tmp_path)
    place.drop("broken.jpg", b"no picture")
    place.run_once()
    refused = place.command("redo", *arguments)
    assert refused.returncode == status
    assert word in refused.stderr


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "did not answer in time"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "did not answer in time"),
        (
            b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 8\r\n\r\nInternal",
            "stopped before it could answer",
        ),
    ],
    ids=["nothing", "a part", "an error"],
)
def test_a_daemon_that_takes_a_request_and_does_not_answer_is_not_taken_for_another_one(
    answer: bytes, reason: str, tmp_path: Path
) -> None:
    place = Place(tmp_path)
    place.drop_many(range(1))
    assert place.run_once().returncode == 0

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as connection:
                    if answer:
                        asked = b""
                        while not asked.endswith(
                            b"[1]"
                        ):  # closed with bytes unread, the answer would be lost
                            asked += connection.recv(1 << 16)
                        connection.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener, lock_state(tmp_path / "state"):
        with socket_address(tmp_path / "state" / CONTROL) as address:
            listener.bind(address)
        listener.listen()
        thread = threading.Thread(target=hang_up)
        thread.start()
        refused = place.command("redo", "1")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert refused.returncode == os.EX_TEMPFAIL
    assert reason in refused.stderr.replace("\n", " ")


@pytest.mark.parametrize("since", ["2026-01-02", "2026-01-02T03:04", "2026-01-02T03:04:05+00:00"])
def test_results_of_a_time_or_later_are_made_again_by_all_models(tmp_path: Path, since: str) -> None:
    place = annotated(tmp_path)
    place.configure({"stages": NO_MODEL})
    assert redo(place, "--since", since) == ("6 images pending again\n", NO_DAEMON)
    assert place.run_once().stdout.startswith("0 done, 6 failed"), "the models were to run"


def test_results_that_are_older_stay(tmp_path: Path) -> None:
    place = annotated(tmp_path)
    assert redo(place, "--since", "2999-01-01")[0] == "0 images pending again\n"
    refused = place.command("redo", "--since", "2999-01-01", "--all")
    assert (refused.returncode, "exactly one of" in refused.stderr) == (os.EX_USAGE, True)
