"""Counts that follow each change."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import pytest

from daemon.core.errors import VisiondError
from daemon.core.jobs import Admitted, JobStatus, Waiting
from daemon.monitoring import counts as counts_module
from daemon.monitoring.counts import Counts, Hour, WaitingCount
from tests.daemon_process import PATIENCE, Daemon, Place, counts_of, until
from tests.makers import done, failed, make_job, postponed

PENDING, DONE, FAILED, SKIPPED, GONE = JobStatus


def begun(**states: int) -> Counts:
    counts = Counts()
    counts.begin({JobStatus[name]: images for name, images in states.items()})
    return counts


def test_an_image_leaves_pending_once_and_not_when_it_is_to_be_tried_again() -> None:
    counts = begun(PENDING=3)
    for ending in (postponed(make_job(), 1.0), done(make_job()), failed(make_job())):
        counts.finished(ending)
    assert [counts.of(status) for status in JobStatus] == [1, 1, 1, 0, 0]
    assert counts.outcomes() == {PENDING: 1, DONE: 1, FAILED: 1}


def test_images_that_had_ended_before_do_not_count_as_ended_in_this_run() -> None:
    counts = begun(PENDING=1, DONE=1000, FAILED=2)
    assert counts.outcomes() == {PENDING: 1}


def test_a_new_version_replaces_one_that_waited_or_that_had_failed() -> None:
    counts = begun(PENDING=5, FAILED=2)
    counts.admitted(Admitted(pending=3, skipped=1, replaced=1, failures_replaced=2))
    assert [counts.of(status) for status in JobStatus] == [7, 0, 0, 1, 1]
    assert counts.ended == {SKIPPED: 1, GONE: 1}


def test_a_version_that_was_gone_and_is_there_again_is_gone_no_more() -> None:
    counts = begun(GONE=3)
    counts.admitted(Admitted(pending=2, skipped=1, replaced=0, returned=2))
    assert [counts.of(status) for status in JobStatus] == [2, 0, 0, 1, 1]


def test_the_daemon_counts_a_file_that_comes_back_once(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop("sub/a.ppm", b"not an image")
    with Daemon(place) as daemon:
        daemon.wait_until(lambda status: status["failed"] == 1, "its failure")
        (place.inbox() / "sub").rename(tmp_path / "sub")
        assert place.command("retry", "--all").returncode == 0
        daemon.wait_until(lambda status: status["gone"] == 1, "its disappearance")
        (tmp_path / "sub").rename(place.inbox() / "sub")
        status = daemon.wait_until(
            lambda status: status["failed"] == 1 and not status["pending"], "its second failure"
        )
        assert (status["failed"], status["gone"]) == (1, 0)
        assert daemon.stop() == 0
    assert counts_of(place) == {"FAILED": 1}


def test_an_image_that_was_put_back_and_then_vanished_keeps_its_result() -> None:
    counts = begun(DONE=10)
    counts.put_back(DONE, 2)
    assert (counts.of(PENDING), counts.of(DONE)) == (2, 8)
    counts.admitted(Admitted(pending=0, skipped=0, replaced=0, results_kept=1))
    assert (counts.of(PENDING), counts.of(DONE)) == (1, 9)
    assert counts.outcomes() == {PENDING: 1}


def test_each_minute_has_what_was_finished_in_it_and_an_idle_one_nothing() -> None:
    hour = Hour()
    assert hour.note(6000.0, 0) == [0]
    assert hour.note(6059.0, 5) == [5]
    assert hour.note(6061.0, 7) == [5, 2]
    assert hour.note(6061.0 + 180, 7) == [5, 2, 0, 0, 0]


def test_an_hour_has_sixty_minutes_also_after_a_machine_has_slept() -> None:
    hour = Hour()
    hour.note(0.0, 1)
    assert hour.note(59 * 60, 1) == [1, *[0] * 59]
    assert hour.note(60 * 60, 3) == [*[0] * 59, 2]
    assert hour.note(9e9, 4) == [*[0] * 59, 1]


def test_pruned_rows_are_counted_no_more_but_of_failed_files_the_newest_version_stays() -> None:
    counts = begun(FAILED=1, GONE=3)
    counts.pruned(GONE)
    counts.pruned(FAILED)
    assert (counts.of(FAILED), counts.of(GONE)) == (1, 2)


def test_work_begins_with_the_first_image_that_waits_not_with_each() -> None:
    counts = begun()
    counts.admitted(Admitted(pending=1, skipped=0, replaced=0))
    counts.finished(done(make_job()))
    assert counts.began[1] == 0
    counts.admitted(Admitted(pending=2, skipped=0, replaced=0))
    assert (began := counts.began)[1] == 1
    counts.finished(done(make_job()))
    counts.admitted(Admitted(pending=1, skipped=0, replaced=0))
    assert counts.began == began


@pytest.mark.anyio
async def test_a_slow_count_delays_no_scrape_and_is_repeated_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts_module, "COUNT_SECONDS", 0.2)
    seconds, counts = 0.0, 0
    go_on, counted = threading.Event(), threading.Event()

    def read() -> dict[int, Waiting]:
        nonlocal seconds, counts
        counts += 1
        go_on.wait(10)
        seconds += 2.0
        counted.set()
        return {1: Waiting(counts, 0.0)}

    count = WaitingCount(read, lambda: seconds)
    while not counts:
        assert await count.count() == {}
    assert await count.count() == {}
    go_on.set()
    await until(counted.is_set)
    with anyio.fail_after(PATIENCE):
        while not await count.count():
            await anyio.lowlevel.checkpoint()
    seconds += 99.0
    assert await count.count() == {1: Waiting(1, 0.0)}
    seconds += 1.0
    await count.count()
    await until(lambda: counts == 2)


@pytest.mark.anyio
async def test_a_count_for_which_no_thread_was_free_in_time_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = WaitingCount(lambda: {1: Waiting(3, 0.0)})
    monkeypatch.setattr(counts_module, "COUNT_SECONDS", 0.0)
    assert await count.count() == {}
    monkeypatch.setattr(counts_module, "COUNT_SECONDS", PATIENCE)
    assert await count.count() == {1: Waiting(3, 0.0)}


@pytest.mark.anyio
async def test_a_count_that_fails_leaves_the_last_one() -> None:
    answers = iter([{1: Waiting(3, 0.0)}])

    def read() -> dict[int, Waiting]:
        for answer in answers:
            return answer
        raise VisiondError("the ledger is damaged")

    clock = iter(range(0, 10**6, 1000))
    count = WaitingCount(read, lambda: float(next(clock)))
    assert await count.count() == await count.count() == {1: Waiting(3, 0.0)}
