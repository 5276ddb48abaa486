"""Counters exist before their first event: Prometheus sees no increase in one that starts at 1."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from daemon.core.jobs import Ending, JobStatus
from daemon.monitoring.metrics import Metrics
from tests.daemon_process import Daemon, Place, picture, wait_for
from tests.makers import done, failed, make_job, postponed

FAULTS = {"STUMBLE": "transient", "RAISE": "raise", "CRASH": "exit", "CROWD": "oom", "HANG": "hang"}


def counted(daemon: Daemon) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a counter or a histogram, by name and labels."""
    families = text_string_to_metric_families(daemon.fetch("/metrics")[1].decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


def test_no_event_gives_birth_to_a_label_set(tmp_path: Path) -> None:
    place = Place(
        tmp_path, {"stages": {"ocr": {"options": {"fail": FAULTS}}}, "pipeline": {"max_attempts": 2}}
    )
    place.configure({"pipeline": {"batch_timeout_seconds": 1.0}})
    with Daemon(place) as daemon:
        before = counted(daemon)
        assert not any(
            value for (name, _), value in before.items() if name.startswith("visiond_worker_restarts")
        )
        place.drop_many(range(5))
        for number, fault in enumerate(FAULTS):
            place.drop(f"{fault}.ppm", picture(100 + number, fault.encode()))
        place.drop("broken.jpg", b"no picture")
        place.drop("empty", b"")
        place.drop("notes.txt", b"no image")
        (place.inbox() / "link").symlink_to(tmp_path)
        daemon.wait_idle(13)
        place.drop("copy.ppm", picture(0))
        daemon.wait_idle(15)
        os.kill(daemon.workers()[0], signal.SIGKILL)
        wait_for(
            lambda: daemon.metric("visiond_worker_restarts_total", device="cpu", reason="died"),
            "a worker lost",
        )
        after = counted(daemon)
    assert after.keys() - before.keys() == set()
    risen = {name for name, labels in after if after[name, labels] > before[name, labels]}
    for name in (
        "images",
        "retries",
        "bins",
        "reused_results",
        "worker_restarts",
        "out_of_memory",
        "stage_images",
    ):
        assert f"visiond_{name}_total" in risen
    assert {"visiond_stage_duration_seconds_count", "visiond_batch_images_count"} <= risen


def test_a_scrape_says_how_many_images_are_failed_now_and_how_many_are_of_earlier_models(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    place.drop_many(range(3))
    place.drop("broken.ppm", b"no image")
    with Daemon(place) as daemon:
        daemon.wait_idle(4)
        assert (daemon.metric("visiond_images_failed"), daemon.metric("visiond_images_outdated")) == (1, 0)
    place.configure({"stages": {"ocr": {"options": {"salt": 1}}}})
    with Daemon(place) as daemon:
        wait_for(lambda: daemon.metric("visiond_images_outdated") == 3, "the images of the first model")
        assert daemon.metric("process_start_time_seconds") > daemon.metric("process_max_fds") > 0


def test_a_worker_that_is_killed_once_has_made_the_counter_rise_by_one(tmp_path: Path) -> None:
    """What increase() computes: the last sample minus the first one with the same labels."""
    with Daemon(Place(tmp_path)) as daemon:
        before = counted(daemon)
        os.kill(daemon.workers()[0], signal.SIGKILL)
        wait_for(lambda: sum(1 for _ in daemon.events("worker lost")), "word of it")
        key = ("visiond_worker_restarts_total", frozenset({("device", "cpu"), ("reason", "died")}))
        assert counted(daemon)[key] - before[key] == 1


def test_an_image_counts_for_its_inbox_once_and_a_redo_does_not_count_as_a_wait() -> None:
    metrics = Metrics()
    metrics.begin_inboxes({1: "scans", 2: "mail"})
    again = make_job(has_result=True)
    metrics.finished(
        [
            done(make_job()),
            done(again),
            failed(make_job()),
            postponed(make_job(), 1.0),
            Ending(again, JobStatus.GONE, 2e9, 0),  # it keeps its result
            done(make_job(inbox=2)),
        ]
    )
    assert metrics.value("visiond_inbox_images_total", inbox="scans", outcome="done") == 2
    assert metrics.value("visiond_inbox_images_total", inbox="scans", outcome="failed") == 1
    assert metrics.value("visiond_inbox_images_total", inbox="scans", outcome="gone") == 0
    assert metrics.value("visiond_inbox_first_results_total", inbox="scans") == 1
    assert metrics.value("visiond_images_total", outcome="done", reason="") == 3
    assert metrics.value("visiond_inbox_images_total", inbox="mail", outcome="done") == 1
