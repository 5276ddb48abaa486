"""A worker whose answers become wrong without an error: a real daemon, whose fake models can break."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.daemon_process import Daemon, Place, counts_of, with_pauses
from tests.forking import CHILDREN_PATH

WRONG = "answers to known images are wrong"

# A worker looks after every third image, as a look comes only after a batch. While FILE is there its fake models take an image
# for another one. Other workers are started at once.
BREAKABLE = """
import os, sys
if "daemon.workers.child" in sys.orig_argv:
    import daemon.workers.canary as canary, stages.registry.fake as fake
    canary.PAUSE_SECONDS, canary.SHARE = 0, 1
    right = fake.variant_of
    fake.variant_of = lambda image: WRONG if os.path.exists(FILE) else right(image)
"""


CONSTANT, OTHER = "0", "(right(image) + 1) % 64"  # the same one for all; or a different one for each
# As from a decoder that gives black for one format: known images are no PPM.
ONLY_PPM = "(0 if image.data[:2] == b'P6' else right(image))"
# Few images are enough for the running figures, and those that are not equal are no doubt.
SOON = """
    import daemon.workers.stream as stream
    stream.WINDOW, stream.FAR, canary.READ_SECONDS, canary.HOUR_SECONDS = 5, 9, 0, 0.5
"""
WORKER = "ocr+yolo+clip+blip/0"


def make_breakable(folder: Path, wrong: str = CONSTANT) -> tuple[Path, dict[str, str]]:
    """The file that breaks the models while it is there, and the environment of the daemon."""
    file, site = folder / "broken", folder / "site"
    site.mkdir()
    text = BREAKABLE.replace("FILE", repr(str(file))).replace("WRONG", wrong)
    (site / "sitecustomize.py").write_text(text)
    return file, {CHILDREN_PATH: str(site), **with_pauses({"daemon.workers.pool.BACKOFF_SECONDS": 0.01})}


def wait_for_a_look(daemon: Daemon) -> None:
    daemon.wait_until(lambda _: looked_at(daemon) > 0, "a look")


def looked_at(daemon: Daemon) -> float:
    return daemon.metric("visiond_canary_last_success_timestamp_seconds", worker=WORKER)


def test_a_worker_with_wrong_answers_is_replaced_and_no_image_is_blamed(tmp_path: Path) -> None:
    place, (file, environment) = Place(tmp_path), make_breakable(tmp_path)
    with Daemon(place, environment=environment) as daemon:
        place.drop_many(range(20))
        daemon.wait_idle(20)
        wait_for_a_look(daemon)
        file.touch()
        place.drop_many(range(20, 120))
        event = daemon.wait_event(WRONG)
        file.unlink()
        daemon.wait_idle(120)
        assert event["device"] == "cpu"
        assert event["faults"]["clip"] == "it gives the same embedding for different images"
        since = event["redo"].removeprefix("visiond redo --since ").split()[0]
        assert datetime.fromisoformat(since) <= datetime.fromisoformat(event["timestamp"])
        assert daemon.metric("visiond_canary_failures_total", device="cpu", stage="clip") >= 1
        assert daemon.metric("visiond_worker_restarts_total", device="cpu", reason="wrong") >= 1
    assert counts_of(place) == {"DONE": 120}
    assert place.rows("SELECT SUM(deaths) FROM image") == [(0,)]


def test_a_worker_without_images_is_looked_at_too(tmp_path: Path) -> None:
    place, (file, environment) = Place(tmp_path), make_breakable(tmp_path)
    site = tmp_path / "site" / "sitecustomize.py"
    site.write_text(site.read_text().replace("canary.SHARE = 0, 1", "canary.HOUR_SECONDS = 0, 0.1"))
    with Daemon(place, environment=environment) as daemon:
        wait_for_a_look(daemon)
        file.touch()
        assert daemon.wait_event(WRONG)["faults"].keys() >= {"clip"}
        file.unlink()
        place.drop_many(range(4))
        daemon.wait_idle(4)
    assert counts_of(place) == {"DONE": 4}


def test_equal_embeddings_are_shown_although_the_known_images_are_right(tmp_path: Path) -> None:
    place, (file, environment) = Place(tmp_path), make_breakable(tmp_path, ONLY_PPM)
    site = tmp_path / "site" / "sitecustomize.py"
    site.write_text(site.read_text() + SOON)

    def is_suspicious(_: object) -> bool:
        return daemon.metric("visiond_answers_suspicious", worker=WORKER, stage="clip") == 1

    with Daemon(place, environment=environment) as daemon:
        place.drop_many(range(20))
        daemon.wait_idle(20)
        daemon.wait_until(lambda _: not is_suspicious(_), "answers that are not suspicious")
        file.touch()
        place.drop_many(range(20, 200))
        daemon.wait_idle(200)
        now = time.time()
        daemon.wait_until(lambda _: looked_at(daemon) > now, "a look without images")
        daemon.wait_until(is_suspicious, "suspicious answers")
        file.unlink()
        place.drop_many(range(200, 240))
        daemon.wait_until(lambda _: not is_suspicious(_), "answers that are not suspicious")
        assert daemon.metric("visiond_canary_failures_total", device="cpu", stage="clip") == 0


def test_a_device_whose_answers_stay_wrong_closes_its_slot(tmp_path: Path) -> None:
    place, (file, environment) = Place(tmp_path), make_breakable(tmp_path)
    with Daemon(place, environment=environment) as daemon:
        place.drop_many(range(8))
        daemon.wait_idle(8)
        file.touch()
        place.drop_many(range(8, 40))
        cause = daemon.wait_event("worker slot closed: its workers keep dying")["cause"]
        assert cause.startswith("its answers to known images are wrong: ")
        assert daemon.wait_end() == os.EX_UNAVAILABLE
    assert "FAILED" not in counts_of(place)


def test_the_reference_outlives_the_daemon(tmp_path: Path) -> None:
    """The models break while no daemon runs, as with a new driver; their answers are still different ones."""
    place, (file, environment) = Place(tmp_path), make_breakable(tmp_path, OTHER)
    place.drop_many(range(20))
    with Daemon(place, environment=environment) as daemon:
        wait_for_a_look(daemon)
        assert daemon.stop() == 0
    file.touch()
    place.drop_many(range(20, 40))
    with Daemon(place, environment=environment) as daemon:
        assert daemon.wait_event(WRONG)["faults"].keys() >= {"clip"}


def test_results_that_were_wrong_are_made_again_although_the_models_are_the_same(tmp_path: Path) -> None:
    place, (file, environment) = Place(tmp_path), make_breakable(tmp_path)
    site = tmp_path / "site" / "sitecustomize.py"
    site.write_text(site.read_text().replace("PAUSE_SECONDS, canary.SHARE = 0, 1", "PAUSE_SECONDS = 1e9"))
    with Daemon(place, environment=environment) as daemon:
        place.drop_many(range(6))
        daemon.wait_idle(6)
        began = datetime.now(UTC).isoformat()
        file.touch()
        place.drop_many(range(6, 12))
        daemon.wait_idle(12)
        assert place.judge().wrong
        file.unlink()
        done = place.command("redo", "--since", began)
        assert (done.returncode, done.stdout) == (0, "6 images pending again\n"), done.stderr
        daemon.wait_idle(18)
        assert " damaged" not in daemon.log_text()
    place.assert_kept(DONE=12)


def test_a_ledger_whose_results_wait_to_be_made_again_is_not_damaged(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(3))
    assert place.run_once().returncode == 0
    assert place.command("redo", "--since", "2020-01-01").returncode == 0
    checked = place.command("verify")
    assert checked.returncode == 0, checked.stdout + checked.stderr
